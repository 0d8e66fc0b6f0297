"""The reporter: metrics to the sinks, samples and summary to the run folder, progress to the console.

Owns when things are written and how write failures are handled; each sink owns its format. The loop passes
trajectories and metrics without knowing their destinations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from math import isnan, nan
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import RenderableType

from braid.errors import ReportError, StopTraining, WorkerError, disk_fix
from braid.types import Group, Row, text_of

from .batches import write_batch
from .closing import closing
from .metrics import Metrics
from .run_dir import RunDir
from .samples import Decode, write_samples
from .sinks.base import SampleRow, ShowsSamples, Sink
from .sinks.console import Console, clock

logger = logging.getLogger(__name__)

Status = Literal["running", "finished", "failed", "interrupted", "stopped", "not_learned"]


_MOST_CHARACTERS = 2000
"""Of a prompt or an answer in the tables of sinks: its end, and its start."""


class Counted(Protocol):
    """A data set with row counts by source, as in data.prompts."""

    @property
    def counts(self) -> Mapping[str, Any]: ...


_NO_EVAL: dict[str, Any] = {"round": None, "results": {}}
_NO_BEST: dict[str, Any] = {"round": None, "step": None, "value": None, "num_since": 0}


@dataclass(slots=True)
class _State:
    """What a resumed run continues. `wall_s` is the time before this process started or resumed."""

    round: int | None = None
    step: int = 0
    wall_s: float = 0.0
    first_eval: dict[str, Any] = field(default_factory=lambda: _NO_EVAL)
    last_eval: dict[str, Any] = field(default_factory=lambda: _NO_EVAL)
    best_eval: dict[str, Any] = field(default_factory=lambda: _NO_BEST)
    restarts: int = 0
    trips: dict[str, dict[str, Any]] = field(default_factory=dict)


class Reporter:
    """Reports the progress and results of a run. Built before the run's components, so that they can report
    too.

    `decode` turns token ids into the text of stored samples; it may be set once the tokenizer is loaded. A
    sink that fails is logged once and removed; a summary that cannot be written is logged once. A failure of
    metrics.jsonl raises ReportError.
    """

    def __init__(
        self,
        run_dir: RunDir,
        console: Console,
        sinks: Sequence[Sink] = (),
        *,
        checkpoints: Path | None = None,
        best: tuple[str, bool] | None = None,
    ) -> None:
        """`checkpoints` is the checkpoint folder; None for the one in the run folder. `best` is the result
        over all evaluation data by which evaluations are compared, and whether lower values are better."""
        self.run_dir, self.console = run_dir, console
        self._checkpoints = checkpoints or run_dir.checkpoints
        self._best = best
        self.decode: Decode | None = None
        self._sinks: list[Sink] = [*sinks, console]
        self._data: dict[str, dict[str, dict[str, int]]] = {}
        self._evaluated: Path | None = None
        self._is_summary_late = False
        self._has_begun = False
        self.is_stop_asked = False
        """Whether a sink has raised StopTraining."""
        self.checks_off: Mapping[str, str] = {}
        """Checks of the loop that do not hold in this run, with the reason."""
        self._state = self._earlier = _State()
        self._start_s = self._line_s = time.monotonic()
        self._is_rewound = False

    def begin(self, sinks: Sequence[Sink] = ()) -> None:
        """Write the first summary, and report to further `sinks`. Follows `load` if the run is resumed."""
        self._has_begun = True
        self._sinks[:0] = sinks
        self._summarize_running()

    @contextmanager
    def phase(self, verb: str) -> Iterator[None]:
        """Show the phase `verb` while the context lasts. WorkerErrors are labelled with it."""
        with self.console.phase(verb):
            try:
                yield
            except WorkerError as error:
                error.phase = error.phase or verb
                raise

    def progress(self, verb: str, done: int, total: int) -> None:
        """Show the progress of a long phase."""
        self.console.progress(verb, done, total)

    def count_data(self, **read: Counted) -> None:
        """Report the rows of each source, and how many were too long, by the use of the data (train, eval,
        sft, sft_eval, prefer, prefer_eval)."""
        for role, prompts in read.items():
            self._data[role] = {source: asdict(counts) for source, counts in prompts.counts.items()}
            for source, counts in prompts.counts.items():
                line = f"{role} data  {source}: {counts.rows:,} rows"
                if counts.dropped_overlong:
                    line += f", {counts.dropped_overlong:,} dropped as too long"
                if counts.truncated:
                    line += f", {counts.truncated:,} truncated"
                if num_equal := getattr(counts, "dropped_equal", 0):
                    line += f", {num_equal:,} dropped for equal responses"
                if num_untrained := getattr(counts, "dropped_untrained", 0):
                    line += f", {num_untrained:,} dropped with nothing to learn"
                self.console.say(line)

    def log(self, round_: int, step: int, metrics: Metrics) -> None:
        """Write a round's metrics to all sinks, and update the summary."""
        self._rewind()
        now = time.monotonic()
        metrics.add("time/round_s", now - self._line_s)
        self._line_s = now
        flat = metrics.flat()
        progress = self._state
        progress.round, progress.step = round_, step
        if results := _eval_results(flat):
            progress.last_eval = {"round": round_, "results": results}
            if progress.first_eval["round"] is None:
                progress.first_eval = progress.last_eval
            self._compare(results.get("all", {}))
        for sink in tuple(self._sinks):
            self._try(sink, lambda sink=sink: sink.log(round_, step, flat))
        self._summarize_running()

    def store_samples(self, name: str, groups: Sequence[Group], rows: Sequence[Row] = ()) -> None:
        """Store trajectories with their training values as samples/`name`.jsonl. Write errors are only
        logged."""
        write = partial(write_samples, groups=groups, rows=rows, decode=self.decode)
        self._store("samples", self._samples(name), write)
        kind, _, number = name.partition("_")
        for sink in tuple(self._sinks):
            if isinstance(sink, ShowsSamples) and (table := _table(groups, sink.num_samples)):
                use = "eval" if kind == "eval" else "train"
                self._try(sink, partial(sink.log_samples, use, int(number), table))

    def store_batch(self, name: str, groups: Sequence[Group], rows: Sequence[Row]) -> None:
        """Store all arrays of training rows as batches/`name`. Write errors are only logged."""
        self._store(
            "training rows", self.run_dir.batches / name, partial(write_batch, groups=groups, rows=rows)
        )

    def _store(self, what: str, path: Path, write: Callable[[Path], None]) -> None:
        self._rewind()
        try:
            write(path)
        except OSError as error:
            logger.warning(
                "cannot store %s: cannot write %s: %s; %s", what, path, error.strerror, disk_fix(error)
            )

    def tell_evaluated(self, checkpoint: Path | None) -> None:
        """Report which checkpoint is evaluated, also in the summary. None: the model of the config."""
        self._evaluated = checkpoint
        self.console.say(f"evaluating {checkpoint or 'the model of the config'}")

    def restart(self) -> None:
        """Reset when the run starts over or resumes from a checkpoint (then `load` follows) in the same
        process. The summary counts restarts."""
        restarts = self._state.restarts + 1
        last = self._state if self._is_rewound else self._earlier
        wall_s = last.wall_s + time.monotonic() - self._start_s
        self._earlier = replace(last, wall_s=wall_s, restarts=restarts)
        self._state = _State(restarts=restarts)
        self._start_s = self._line_s = time.monotonic()
        self._is_rewound = False

    def state(self, stored_round: int) -> dict[str, Any]:
        """Return the state that a resumed run needs: the round, the elapsed time, the first and last
        evaluation, ... `stored_round` is the last round whose samples may be stored already."""
        return {**asdict(self._state), "wall_s": self._wall_s, "stored_round": stored_round}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint; records of later rounds are removed from the run folder."""
        kept: dict[str, Any] = {**state, "restarts": max(self._state.restarts, state["restarts"])}
        stored_round = kept.pop("stored_round")
        self._state = _State(**kept)
        self._rewind(stored_round)

    def finish(self, status: Status, error: BaseException | None = None) -> None:
        """Write the final summary, close all sinks and show the closing report. A summary that cannot be
        written is logged, and an error in showing the report ignored: neither changes the outcome of the
        run. A resume that has loaded no checkpoint leaves the summary as it is."""
        if not self._is_rewound:  # ended before it wrote anything: the other files are those before a restart
            self._state = self._earlier
        try:
            if self._has_begun or self._is_rewound:
                self._summarize(status, error)
        except ReportError as failure:
            logger.error("%s", failure)
        for sink in tuple(self._sinks):
            self._try(sink, sink.close)
        self._sinks = []
        if self.console.mode != "none":
            with suppress(OSError, UnicodeError):
                self.console.screen.print(self._closing(status), crop=False)
        self.run_dir.close()

    @property
    def trips(self) -> dict[str, dict[str, Any]]:
        """The checks of the loop that have tripped, by name, with the fields of braid.checks.Trip. What is
        put here is in the next summary and in the closing report."""
        return self._state.trips

    @property
    def first_eval(self) -> dict[str, dict[str, float]]:
        """Results of the first evaluation, source -> name -> value; empty if there is none yet."""
        return self._state.first_eval["results"]

    @property
    def last_eval(self) -> dict[str, dict[str, float]]:
        """Results of the latest evaluation."""
        return self._state.last_eval["results"]

    @property
    def best_eval(self) -> dict[str, Any]:
        """The best evaluation so far: `round`, `step` and `value`, which are None if there is none, and
        `num_since`, the number of evaluations after it."""
        return self._state.best_eval

    def _compare(self, results: Mapping[str, float]) -> None:
        """Note whether the results of an evaluation, over all data, are the best so far."""
        if self._best is None:
            return
        name, is_lower_better = self._best
        progress, value = self._state, results.get(name, nan)
        best = progress.best_eval["value"]
        if not isnan(value) and (best is None or (value < best if is_lower_better else value > best)):
            progress.best_eval = {
                "round": progress.round,
                "step": progress.step,
                "value": value,
                "num_since": 0,
            }
        elif best is not None:
            progress.best_eval = {**progress.best_eval, "num_since": progress.best_eval["num_since"] + 1}

    @property
    def _wall_s(self) -> float:
        return self._state.wall_s + time.monotonic() - self._start_s

    def _rewind(self, stored_round: int | None = None) -> None:
        """Before the first write: rewind the run folder to the round from which this run resumes."""
        if self._is_rewound:
            return
        self._is_rewound = True
        self.run_dir.rewind(self._state.round, stored_round)
        self.console.go_on(self.run_dir.read_metrics())

    def _try(self, sink: Sink, act: Callable[[], None]) -> None:
        try:
            act()
        except ReportError:
            raise
        except StopTraining:
            self.is_stop_asked = True
        except Exception as error:  # a tracker's failure must not end the run
            self._sinks.remove(sink)
            why = f"{type(error).__name__}: {error}"
            logger.warning("%s failed and is disabled for the rest of the run: %s", sink.name, why)

    def _summarize_running(self) -> None:
        try:
            self._summarize("running")
        except ReportError as failure:
            if not self._is_summary_late:
                logger.warning("%s; the run continues without a current summary", failure)
            self._is_summary_late = True

    def _summarize(self, status: Status, error: BaseException | None = None) -> None:
        progress = self._state
        summary = {
            "status": status,
            "round": progress.round or 0,
            "num_rounds": self.console.num_rounds,
            "steps": progress.step,
            "wall_s": round(self._wall_s, 3),
            "restarts": progress.restarts,
            "eval": {
                "first": self.first_eval,
                "last": self.last_eval,
                "first_round": progress.first_eval["round"],
                "last_round": progress.last_eval["round"],
                "best": {name: progress.best_eval[name] for name in ("round", "step", "value")},
            },
            "checkpoint": None if self._evaluated is None else str(self._evaluated),
            "data": self._data,
            "checks": {"tripped": list(progress.trips.values()), "off": dict(self.checks_off)},
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }
        self.run_dir.write_summary(summary)

    def _closing(self, status: Status) -> RenderableType:
        run, evals = self.run_dir, (self._state.first_eval, self._state.last_eval)
        first, last = (self._samples(f"eval_{result['round'] or 0:06d}") for result in evals)
        return closing(
            status,
            time_text=clock(self._wall_s),
            results=(None if evals[0]["round"] == evals[1]["round"] else self.first_eval, self.last_eval),
            trips=list(self.trips.values()),
            samples=(first, last),
            files={
                "run": run.path,
                "metrics": run.metrics,
                "samples": run.samples,
                "videos": run.videos,
                "batches": run.batches,
                "checkpoints": self._checkpoints,
                "exports": run.exports,
            },
        )

    def _samples(self, name: str) -> Path:
        return self.run_dir.samples / f"{name}.jsonl"


def _eval_results(flat: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Extract source -> name -> value from the metrics of a round. eval/part/<part> is of no source, unless
    one is called part."""
    results: dict[str, dict[str, float]] = {}
    has_parts = "eval/part/num" not in flat
    for name, value in flat.items():
        if name.startswith("eval/") and not (has_parts and name.startswith("eval/part/")):
            source, _, what = name.removeprefix("eval/").rpartition("/")
            results.setdefault(source, {})[what] = value
    return results


def _table(groups: Sequence[Group], most: int) -> list[SampleRow]:
    """One trajectory of each of the first groups that have text."""
    firsts = (group.trajectories[0] for group in groups if group.trajectories)
    return [
        SampleRow(
            trajectory.prompt.uid,
            text_of(trajectory.prompt.messages[-1]["content"])[-_MOST_CHARACTERS:],
            trajectory.answer_text[:_MOST_CHARACTERS],
            trajectory.reward,
            trajectory.status.value,
        )
        for trajectory in islice((t for t in firsts if t.prompt.messages and t.answer_text), most)
    ]
