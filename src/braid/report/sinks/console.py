"""Terminal output during a run: a live display, or else one line per round, with log messages above it.

closing.py has the report at the end of a run.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self

from rich.console import Console as RichConsole
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

Mode = Literal["auto", "live", "plain", "none"]

MAX_WIDTH = 100
"""Columns of the live display on wide terminals."""
ROUNDS_FOR_RATE = 20
"""Number of latest rounds from which the remaining time is estimated."""

EVAL_MEAN, ACCURACY = "eval/all/mean", "eval/all/pass@1"
"""EVAL_MEAN stands for eval/all/mean@n with any n, and is hidden if it equals the accuracy. An accuracy of 0
beside another mean is hidden: rewards are dense, or partial so far."""
EVAL_RANGE = "eval/all/reward_min", "eval/all/reward_max"


def _share(value: float) -> str:
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


class Shown(NamedTuple):
    """A displayed metric: its label, name, format and unit ({} for the unit of the policy's output)."""

    label: str
    name: str
    form: Callable[[float], str]
    unit: str = ""
    hides_zero: bool = False

    def text(self, value: float) -> str:
        """`-` for nan: there was nothing to measure."""
        return "-" if math.isnan(value) else self.form(value)


SHOWN = (
    Shown("reward", "reward/mean", "{:.3f}".format),
    Shown("success", "env/success_once", "{:.0%}".format),
    Shown("invalid", "rollout/invalid_fraction", _share, hides_zero=True),
    Shown("loss", "sft/loss", "{:.4f}".format),
    Shown("loss", "prefer/loss", "{:.4f}".format),
    Shown("pairs right", "prefer/accuracy", "{:.1%}".format),
    Shown("margin", "prefer/margin", "{:.3f}".format),
    Shown("held-out loss", "eval/all/loss", "{:.4f}".format),
    Shown("held-out pairs right", "eval/all/accuracy", "{:.1%}".format),
    Shown("accuracy", ACCURACY, "{:.1%}".format),
    Shown("eval", EVAL_MEAN, "{:.3f}".format),
    Shown("eval invalid", "eval/all/invalid_fraction", _share, hides_zero=True),
    Shown("length", "rollout/output_length_mean", "{:.1f}".format, "{}"),
    Shown("truncated", "rollout/truncated_fraction", "{:.0%}".format),
    Shown("equal groups", "reward/same_in_group_fraction", "{:.0%}".format),
    Shown("KL", "policy/kl", "{:.4f}".format, "nats"),
    Shown("entropy", "policy/entropy", "{:.3f}".format, "nats"),
    Shown("value loss", "critic/loss", "{:.4f}".format),
    Shown("sampled", "rollout/tokens_per_s", "{:,.0f}".format, "{}/s"),
    Shown("sampled", "env/steps_per_s", "{:,.0f}".format, "env steps/s"),
    Shown("trained", "train/tokens_per_s", "{:,.0f}".format, "{}/s"),
)
"""Displayed metrics, in order. Those that a run lacks are hidden; evaluation results stay until the next
evaluation."""

CURVES = ("reward/mean", "sft/loss", "prefer/loss")
"""Metrics shown with a curve over the run."""


class Console:
    """Shows finished rounds and the running phase. A context manager: the display exists within the context.

    `auto` is live on a UTF-8 terminal and plain elsewhere; `none` shows only log messages. `num_rounds` may
    be set once it is known, and `counted` is the unit of the policy's output if it is not tokens. `screen` is
    the rich console to draw on, by default on standard output.
    """

    name = "the console"

    def __init__(self, mode: Mode, *, title: str, folder: Path, screen: RichConsole | None = None) -> None:
        # bind the current stream, so that report.streams does not redirect the display as reward output
        self.screen = screen or RichConsole(highlight=False, file=sys.stdout)
        self.title = title
        self.num_rounds: int | None = None
        self.counted = "tokens"
        if mode == "auto":
            can_draw = self.screen.is_terminal and not self.screen.is_dumb_terminal
            mode = "live" if can_draw and self.screen.encoding.startswith("utf") else "plain"
        self.mode = mode
        self._folder = folder
        self._start_s = time.monotonic()
        self._ends_s: deque[float] = deque(maxlen=ROUNDS_FOR_RATE + 1)
        self._times: list[tuple[str, float]] = []
        self._phase: _Phase | None = None
        self._open = ExitStack()
        self.go_on(())

    def __enter__(self) -> Self:
        root, braid_logger, handler = logging.getLogger(), logging.getLogger("braid"), _Handler(self.screen)
        self._open.callback(braid_logger.setLevel, braid_logger.level)
        self._open.callback(logging.captureWarnings, capture=False)
        self._open.callback(root.removeHandler, handler)
        braid_logger.setLevel(logging.INFO)
        logging.captureWarnings(capture=True)
        root.addHandler(handler)
        if self.mode == "live":
            live = Live(get_renderable=self._draw, console=self.screen, refresh_per_second=5)
            self._open.enter_context(live).refresh()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing, and leave the display as it is."""
        self._open.close()

    def say(self, text: str) -> None:
        """Print a line, above the live display if there is one."""
        if self.mode != "none":
            # A path or command is copied as one line.
            self.screen.print(Text(printable(text)), soft_wrap=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the phase `name` while the context lasts."""
        outer, self._phase = self._phase, _Phase(name, time.monotonic())
        try:
            yield
        finally:
            self._phase = outer

    @property
    def doing(self) -> str:
        """What the run does now, and since when."""
        phase = self._phase
        if phase is None:
            return f"{self._label} is reported"
        count = f" {phase.done}/{phase.total}" if phase.total else ""
        return (
            f"after {self._label}: {_words(phase.name)}{count} for {time.monotonic() - phase.start_s:.1f} s"
        )

    def progress(self, name: str, done: int, total: int) -> None:
        """Show the progress of a long phase; in plain mode, print a line for each tenth."""
        if self._phase is not None:
            self._phase.done, self._phase.total = done, total
        if self.mode == "plain" and done * 10 // total > (done - 1) * 10 // total:
            self.say(f"{_words(name)} {done}/{total}")

    def go_on(self, records: Sequence[Mapping[str, float | None]]) -> None:
        """Restore the display from `records`, the lines of metrics.jsonl up to the round from which the run
        resumes."""
        self._first: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._curves: dict[str, list[float]] = {name: [] for name in CURVES}
        self._ends_s.clear()
        self._round = self._step = 0
        for record in records:
            self._take({name: value for name, value in record.items() if value is not None})
            self._round, self._step = int(record["round"] or 0), int(record["step"] or 0)

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        """Show the metrics of a finished round."""
        self._take(flat)
        self._round, self._step = round_, step
        self._ends_s.append(time.monotonic())
        self._times = [
            (_words(name.removeprefix("time/").removesuffix("_s")), seconds)
            for name, seconds in flat.items()
            if name.startswith("time/") and name != "time/round_s"
        ]
        if self.mode == "plain":
            self.say(self._line(flat))

    def _take(self, flat: Mapping[str, float]) -> None:
        values = _shown(flat)
        self._latest.update(values)
        self._first = values | self._first
        for name, curve in self._curves.items():
            if name in flat:
                curve.append(flat[name])

    @property
    def _left_s(self) -> float | None:
        """Seconds until the end of the last round, at the mean pace of the latest rounds."""
        if self.num_rounds is None or len(self._ends_s) < 2 or self._round >= self.num_rounds:
            return None
        pace = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        since = time.monotonic() - self._ends_s[-1]
        return max(pace * (self.num_rounds - self._round) - since, 0.0)

    @property
    def _label(self) -> str:
        return f"round {self._round}" + ("" if self.num_rounds is None else f"/{self.num_rounds}")

    def _line(self, flat: Mapping[str, float]) -> str:
        values = _shown(flat)
        shown = [
            f"{s.label} {s.text(values[s.name])} {self._unit(s, values)}".rstrip()
            for s in SHOWN
            if s.name in values and not _is_hidden(s, values)
        ]
        if (seconds := flat.get("time/round_s")) is not None:
            shown.append(f"{seconds:.1f} s")
        if (left := self._left_s) is not None:
            shown.append(f"{clock(left)} left")
        return "  ".join([self._label, *shown])

    def _draw(self) -> RenderableType:
        width = min(self.screen.width, MAX_WIDTH)
        parts: list[RenderableType] = [Text(), self._head(width), self._bar(width), self._activity(), Text()]
        if self._latest:
            parts += [self._table(width), Text()]
        return Stack(*parts)

    def _head(self, width: int) -> RenderableType:
        head = Table.grid(expand=True)
        head.width = width
        head.add_column(no_wrap=True)
        head.add_column(justify="right", no_wrap=True, overflow="ellipsis", style="dim")
        head.add_row(Text.assemble(("braid ", "bold cyan"), (self.title, "bold")), str(self._folder))
        return head

    def _bar(self, width: int) -> RenderableType:
        times = f"step {self._step}, {clock(time.monotonic() - self._start_s)} elapsed"
        if (left := self._left_s) is not None:
            times += f", {clock(left)} left"
        room = width - len(self._label) - len(times) - 4
        if self.num_rounds is None or room < 8:
            return Text.assemble(f"{self._label}  ", (times, "dim"), no_wrap=True, overflow="ellipsis")
        row = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=self.num_rounds, completed=self._round, width=room)
        row.add_row(self._label, bar, Text(times, "dim"))
        return row

    def _activity(self) -> RenderableType:
        """Build the line with the running phase and the longest phases of the last round."""
        cells: list[RenderableType] = []
        if (phase := self._phase) is not None:
            count = f" {phase.done}/{phase.total}" if phase.total else ""
            text = f"{_words(phase.name)}{count}  {time.monotonic() - phase.start_s:.1f} s"
            phase.spinner.update(text=Text(text, "cyan"))
            cells.append(phase.spinner)
        if spent := sorted(self._times, key=lambda item: -item[1])[:3]:
            last = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent)
            cells.append(Text(f"last round: {last}", "dim"))
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(*cells)
        return line

    def _table(self, width: int) -> RenderableType:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True, min_width=11)
        table.add_column(justify="right", no_wrap=True, min_width=8, style="bold")
        table.add_column(no_wrap=True)
        for shown in SHOWN:
            value = self._latest.get(shown.name)
            if value is not None and not _is_hidden(shown, self._latest):
                table.add_row(shown.label, shown.text(value), self._note(shown, width - 26))
        return table

    def _note(self, shown: Shown, room: int) -> Text:
        """Build the annotation of a value: its curve, its first value, or its unit."""
        if curve := self._curves.get(shown.name):
            return Text(sparkline(curve, max(room, 8)), "cyan")
        if shown.name.startswith("eval/") and (first := self._first[shown.name]) != self._latest[shown.name]:
            note = f"{self._unit(shown, self._latest)}  initially {shown.text(first)}"
            return Text(note.strip(), "dim")
        return Text(self._unit(shown, self._latest), "dim")

    def _unit(self, shown: Shown, values: Mapping[str, float]) -> str:
        """Its unit, or for EVAL_MEAN the range of rewards."""
        if shown.name == EVAL_MEAN and all(math.isfinite(values.get(name, math.nan)) for name in EVAL_RANGE):
            low, high = (values[name] for name in EVAL_RANGE)
            return f"({low:.3g} to {high:.3g})"
        return shown.unit.format(self.counted)


def _is_hidden(shown: Shown, values: Mapping[str, float]) -> bool:
    hides_zero = shown.hides_zero or (shown.name == ACCURACY and EVAL_MEAN in values)
    return hides_zero and values[shown.name] == 0


def _shown(flat: Mapping[str, float]) -> dict[str, float]:
    """Select the values of the metrics in SHOWN."""
    names = (*(shown.name for shown in SHOWN), *EVAL_RANGE)
    values = {name: flat[name] for name in names if name in flat}
    if "env/steps_per_s" in values:
        values.pop("rollout/tokens_per_s", None)
    mean = next((value for name, value in flat.items() if name.startswith(f"{EVAL_MEAN}@")), None)
    if mean is not None and mean != values.get(ACCURACY):
        values[EVAL_MEAN] = mean
    return values


@dataclass
class _Phase:
    """The running phase. `total` is 0 while unknown."""

    name: str
    start_s: float
    done: int = 0
    total: int = 0
    spinner: Spinner = field(default_factory=lambda: Spinner("dots", style="cyan"))


class _Handler(logging.Handler):
    """Prints log messages on the screen, above a live display: warnings and errors, and messages of braid at
    INFO and above."""

    def __init__(self, screen: RichConsole) -> None:
        super().__init__(logging.INFO)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.levelno < logging.WARNING and not record.name.startswith("braid"):
                return
            head = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            body = self.format(record)
            if record.name == "py.warnings":  # the first line is followed by the source line
                body = body.splitlines()[0]
            style = "yellow" if record.levelno == logging.WARNING else "bold red"
            self._screen.print(
                Text.assemble((head, style), printable(body, keep_lines=True)),
                soft_wrap=True,
            )
        except Exception:  # required of logging handlers: a broken message must not end the run
            self.handleError(record)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as a curve of at most `width` characters, each the mean of a chunk; gaps if a chunk has
    no finite value."""
    num = min(width, len(values))
    shares = [values[i * len(values) // num : (i + 1) * len(values) // num] for i in range(num)]
    finite = [[v for v in share if abs(v) < float("inf")] for share in shares]  # nan compares as false
    means = [sum(share) / len(share) if share else None for share in finite]
    known = [m for m in means if m is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    marks = "▁▂▃▄▅▆▇█"
    return "".join(" " if m is None else marks[round((m - low) / span * 7) if span else 3] for m in means)


def clock(seconds: float) -> str:
    """Format a duration: `0:42`, `12:05`, `3:01:44`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str, *, keep_lines: bool = False) -> str:
    """Remove terminal control characters, since a model may write anything. Newlines become ↵ unless kept."""
    if not keep_lines:
        text = text.replace("\r\n", "\n").replace("\n", "↵")
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))


def _words(name: str) -> str:
    return name.replace("_", " ")
