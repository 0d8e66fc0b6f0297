"""How far a run has come, its checkpoints, and its end when it is asked to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from braid.cluster.interrupts import RoundCut, StopSignals
from braid.config.report import CheckpointConfig
from braid.errors import StopTraining
from braid.report.metrics import Metrics
from braid.rollout.collector import Collector

from .checkpoints import Checkpoints
from .reports import Reports, is_due

logger = logging.getLogger(__name__)

_ANSWER_S = 8.0
"""Seconds in which idle ranks answer; those that do not are not waited for when the run has been asked to
stop."""
_SAVED_SHARE = 0.02
"""Largest share of wall-clock time that time-based saving may take."""
_LEAST_S = 10.0
"""Shortest time between two time-based saves, in seconds."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of the run; the entry `progress` of every checkpoint.

    `round` counts rollout rounds and `step` the policy's optimizer steps in them. `is_reported` is false
    between the update of a round and its metrics line, while the policy is evaluated. `warm_steps` counts
    optimizer steps of the warm-up, and `is_warm` is true once it is complete. `reference_updates` counts how
    often the policy's weights were copied to the reference, `empty_rounds` the consecutive rounds without
    anything to train on. `kl_coef` is the adaptive KL coefficient; None until it has been adapted.
    """

    round: int = 0
    step: int = 0
    is_reported: bool = True
    warm_steps: int = 0
    is_warm: bool = False
    reference_updates: int = 0
    empty_rounds: int = 0
    kl_coef: float | None = None


@dataclass(slots=True)
class SaveClock:
    """Decides when a checkpoint is due by time. `cost_s` is the duration of the last save."""

    at_s: float = field(default_factory=time.monotonic)
    cost_s: float = 0.0

    def is_due(self, every_s: float) -> bool:
        """Whether `every_s` seconds have passed since the last save, or a shorter time if saving is cheap."""
        wait_s = min(every_s, max(_LEAST_S, self.cost_s / _SAVED_SHARE))
        return every_s > 0 and time.monotonic() - self.at_s >= wait_s

    def saved(self, cost_s: float) -> None:
        """Record that a checkpoint was written."""
        self.at_s, self.cost_s = time.monotonic(), cost_s


class Progress:
    """Counters and unreported metrics of a run, which are saved together with the rest of its state.

    `metrics` are those of the round whose line is not written yet; stages return theirs, and the loops merge
    them here. `stop` has the signals that ask the run to stop, `num_rounds` is the number of its last round,
    if it has rounds, and `patience` is eval.patience.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        checkpoints: Checkpoints,
        reports: Reports,
        stop: StopSignals,
        num_rounds: int | None,
        patience: int | None = None,
    ) -> None:
        self.reports, self.stop, self.num_rounds = reports, stop, num_rounds
        self.counters = Counters()
        self.metrics = Metrics()
        self.config, self._checkpoints, self._patience = config, checkpoints, patience
        self._clock = SaveClock()
        self._saved: Mapping[str, Any] = {}
        """Counters in the newest checkpoint that this run wrote or was restored from."""
        self._update_s: float | None = None
        """Time that the last round took after its rollout."""

    @property
    def round(self) -> int:
        return self.counters.round

    @property
    def is_last_round(self) -> bool:
        """Whether no round follows: a resumed run may be past a last round that was lowered since."""
        return self.num_rounds is not None and self.round >= self.num_rounds

    @property
    def is_complete(self) -> bool:
        """Whether the last round is trained and reported."""
        return self.counters.is_reported and self.is_last_round

    @property
    def is_stop_asked(self) -> bool:
        """Whether a signal or a callback has asked the run to stop, or eval.patience has."""
        return self.stop.is_requested or self.reports.reporter.is_stop_asked or self._is_stale

    @property
    def _is_stale(self) -> bool:
        """Whether the last eval.patience evaluations have improved on nothing."""
        return self._patience is not None and self.reports.reporter.best_eval["num_since"] >= self._patience

    def advance(self, **counters: Any) -> None:
        """Set the named counters."""
        self.counters = replace(self.counters, **counters)

    def start_round(self) -> None:
        """Count a round that begins."""
        self.advance(round=self.round + 1)

    def end_update(self, counters: Counters, metrics: Metrics) -> None:
        """Take over the counters and metrics of a round's update."""
        self.counters = counters
        self.metrics.merge(metrics)

    def report(self) -> None:
        """Write the round's metrics to all sinks, and reset them."""
        self.reports.log(self.round, self.counters.step, self.metrics)
        self.metrics = Metrics()
        self.advance(is_reported=True)

    def check_time(self) -> None:
        """Raise RoundCut if the run has been asked to stop, and an update like the last one would take too
        long."""
        self.stop.check_time(self._update_s)

    @contextmanager
    def timed_update(self) -> Iterator[None]:
        """Measure the time that a round takes after its rollout, including the save that may follow."""
        start = time.perf_counter()
        yield
        self._update_s = time.perf_counter() - start + self._clock.cost_s

    def save_round(self) -> None:
        """Write a checkpoint at the end of a round, if due."""
        config = self.config
        best = self.reports.reporter.best_eval
        is_best = config.keep_best and best["round"] == self.round and best["num_since"] == 0
        if is_best or is_due(self.round, config.every_rounds, is_end=self.is_last_round and config.at_end):
            self._save(self.state())
        else:
            self.save_by_time()

    def save_by_time(self) -> None:
        """Write a checkpoint if it is due by time and no cadence in rounds is set."""
        if not self.config.every_rounds and self._clock.is_due(self.config.every_s):
            self._save(self.state())

    def state(self) -> dict[str, Any]:
        """A copy of the run's state without its models."""
        return {
            "progress": asdict(self.counters),
            "reporter": self.reports.reporter.state(self.round),
            "metrics": self.metrics.state(),
        } | self._checkpoints.state()

    def resume(self, which: str) -> None:
        """Restore the run from a checkpoint; with `latest` and no checkpoint, start from the beginning."""
        store, models = self._checkpoints.store, self._checkpoints.models
        if which == "latest" and not store.steps():
            logger.warning("no checkpoint in %s; starting from the beginning", store.folder)
            return
        folder, step, state = store.locate("latest" if which == "latest" else Path(which))
        self.counters = Counters(**state["progress"])
        self.metrics.load(state["metrics"])
        self._saved = state["progress"]
        self._checkpoints.restore(state, folder, is_warm=self.counters.is_warm)
        if self.counters.is_warm:
            with self.reports.timed("sync_weights", self.metrics):
                models.sync_weights(self.round)
            if (opponent := state.get("opponent")) is not None:
                models.rollouts.workers.every(Collector).load_opponent(opponent)
        self.reports.reporter.load(state["reporter"])  # last, since it removes the records of later rounds
        store.forget_after(step)
        self._say_resumed(folder, step)

    def _say_resumed(self, folder: Path, step: int) -> None:
        if self.counters.is_warm:
            where = f"after round {self.round}" + (
                f" of {self.num_rounds}" if self.num_rounds is not None else ""
            )
        else:
            where = f"after step {self.counters.warm_steps} of supervised fine-tuning"
        logger.info("resumed from %s, %s, step %d", folder, where, step)
        if self.is_complete:
            logger.warning(
                "the run has finished all its %d rounds; to train longer, raise run.max_rounds or "
                "run.max_epochs (braid sft: sft.epochs or sft.steps; braid prefer: prefer.epochs or "
                "prefer.steps)",
                self.num_rounds,
            )

    def stop_if_asked(self) -> None:
        """If a signal has asked the run to stop, save unsaved state and raise KeyboardInterrupt; if a
        callback or eval.patience has, StopTraining."""
        if self.stop.is_requested:
            self._end(self.state())
        if self.is_stop_asked:
            if self._is_stale:
                best = self.reports.reporter.best_eval
                logger.info(
                    "%d evaluations have not improved on %g, after round %s (eval.patience): the run ends",
                    best["num_since"],
                    best["value"],
                    best["round"],
                )
            state = self.state()
            if state["progress"] != self._saved:
                self._save(state)
            raise StopTraining

    @contextmanager
    def given_up_when_late(self) -> Iterator[None]:
        """Wrap a block that changes no model. If the run has been asked to stop, and the block fails or
        cannot finish in the remaining time, save the state from before the block and end the run."""
        before = self.state()
        try:
            yield
        except (RoundCut, Exception) as error:
            if not self.stop.is_requested:
                raise
            if not isinstance(error, RoundCut):
                logger.warning("round %d is abandoned: %s", self.round, error)
            self._end(before)

    @contextmanager
    def cut_when_late(self) -> Iterator[None]:
        """Wrap a weight sync. If the run has been asked to stop, and the block cannot finish in the remaining
        time, save the state and end the run."""
        try:
            with self.stop.cuttable():
                yield
        except RoundCut:
            self._end(self.state())

    def _save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of the models' current state and the matching rest of it."""
        start = time.perf_counter()
        with self.reports.timed("save", self.metrics), self.stop.finishing():
            best = state["reporter"]["best_eval"]["step"] if self.config.keep_best else None
            self._checkpoints.write(state, best)
        self._clock.saved(time.perf_counter() - start)
        self._saved = state["progress"]

    def _end(self, state: Mapping[str, Any]) -> NoReturn:
        """Write a checkpoint as `_save` does, unless there is one of `state` already, and end the run."""
        models = self._checkpoints.models
        if state["progress"] != self._saved:
            if not models.answer(_ANSWER_S):
                # ranks that wait for one of its workers then fail, within 5 s on another machine
                models.rollouts.close()
            if models.answer(_ANSWER_S):
                self._save(state)
            else:
                logger.warning(
                    "round %d is not saved: a worker has not answered for %g s",
                    state["progress"]["round"],
                    _ANSWER_S,
                )
        self.stop.end()
