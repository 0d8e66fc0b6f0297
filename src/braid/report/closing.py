"""Closing report of a run: evaluation results and answers before and after training, and the paths of its
files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from braid.types import text_of

from .samples import Sample, read_samples
from .sinks.console import printable

Results = Mapping[str, Mapping[str, float]]
"""Evaluation: source -> name (mean@n, pass@k, ...) -> value."""

NUM_ANSWERS = 3
"""Number of prompts whose answers are shown."""


def closing(
    status: str,
    *,
    time_text: str,
    results: tuple[Results | None, Results],
    trips: Sequence[Mapping[str, Any]] = (),
    samples: tuple[Path, Path],
    files: Mapping[str, Path],
) -> RenderableType:
    """Stack the parts of the closing report, to be printed with crop=False: a path is one line, however long.
    `results` and `samples` are of the first and the last evaluation; they and the `files` may be missing. The
    first results are None if there was one evaluation. `trips` are checks of the loop that have tripped."""
    style = {"finished": "bold green", "interrupted": "bold yellow", "stopped": "bold yellow"}.get(
        status, "bold red"
    )
    parts: list[RenderableType] = [
        Rule(style="dim"),
        Text.assemble((status.replace("_", " "), style), (f" after {time_text}", "")),
    ]
    if trips:
        parts += [Text(), *(_tripped(trip) for trip in trips)]
    if results[1]:
        parts += [Text(), _learned(*results)]
    if pairs := list(islice(_pairs(*samples), NUM_ANSWERS)):
        parts += [Text(), _answers(pairs)]
    there = {what: path for what, path in files.items() if path.exists()}
    width = max(map(len, there), default=0)
    places = [
        Text.assemble((f"{what:<{width}}", "dim"), f"   {path}", no_wrap=True, overflow="ignore")
        for what, path in there.items()
    ]
    return Stack(*parts, Text(), *places)


def _tripped(trip: Mapping[str, Any]) -> Text:
    """One line on a check of the loop that has tripped."""
    where = f"since round {trip['since']}, in {trip['rounds']} rounds"
    return Text.assemble(
        (f"check {trip['check']} tripped", "bold red"), f" ({trip['sort']}) {where}: {trip['evidence']}"
    )


def _learned(first: Results | None, last: Results) -> Table:
    """The first and last evaluation results of each source."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("evaluation", no_wrap=True)
    for title in ("", "result") if first is None else ("", "first", "last", "change"):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    has_one = len(last) <= 2  # one source: same results as `all`
    for source, values in last.items():
        if has_one and source == "all":
            continue
        title = printable(source)
        for name, after in values.items():
            is_shown = "@" in name or name in ("accuracy", "margin")
            if is_shown and first is None:
                table.add_row(title, name, _number(after))
                title = ""
            elif is_shown and first is not None:
                before = first.get(source, {}).get(name, float("nan"))
                change = after - before
                style = "green" if change > 0 else "red" if change < 0 else "dim"
                table.add_row(title, name, _number(before), _number(after), Text(_number(change, "+"), style))
                title = ""
    return table


def _number(value: float, sign: str = "") -> str:
    return "-" if value != value else f"{value:{sign}.3f}"


def _answers(pairs: list[tuple[Sample, Sample]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim", expand=False)
    for title, ratio in (("prompt", 3), ("answer before", 4), ("answer after", 4)):
        table.add_column(title, ratio=ratio, overflow="fold")
    for before, after in pairs:
        messages = after.trajectory.prompt.messages
        prompt = _cut(text_of(messages[-1]["content"]) if messages else after.prompt_text)
        table.add_row(Text(prompt), _answer(before), _answer(after))
    return table


def _pairs(first: Path, last: Path) -> Iterator[tuple[Sample, Sample]]:
    """Yield the first samples of the prompts in both files, in order; text only."""
    if not (first.exists() and last.exists()) or first == last:
        return
    old = {s.trajectory.prompt.uid: s for s in read_samples(first) if s.trajectory.sample == 0}
    for sample in read_samples(last):
        before = old.get(sample.trajectory.prompt.uid)
        if sample.trajectory.sample == 0 and before is not None and sample.trajectory.turns:
            yield before, sample


def _answer(sample: Sample) -> Text:
    trajectory = sample.trajectory
    if not trajectory.is_valid:
        return Text(_cut(f"invalid: {trajectory.reason}"), "yellow")
    return Text(_cut(trajectory.answer_text or trajectory.sampled_text)).append(
        f"  {trajectory.reward:g}", "dim"
    )


def _cut(text: str, most: int = 160) -> str:
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"
