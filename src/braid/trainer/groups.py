"""The groups of the pipelined loop, from their submission to the end of the update that trains on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext

from braid.cluster.loops import in_thread
from braid.report.metrics import Metrics
from braid.types import Group, Key

from .keys import TRAIN_KEY
from .pipeline import Draw, Pipeline
from .progress import Counters, Progress
from .round_metrics import lag_metrics
from .sampling import Sampling
from .selection import Selection, reason_to_drop

Updated = tuple[Counters, Metrics]
"""The counters after an update, and its metrics."""

_TICK_S, _IDLE_TICK_S = 0.02, 0.5
"""How long to wait for groups, in seconds, while an update runs, whose end has to be noticed, and
otherwise."""


class GroupsInFlight:
    """Samples and trains as `pipeline` decides, and reports to it. `train` is the update of a round; while it
    runs, only its thread uses the models."""

    def __init__(
        self,
        sampling: Sampling,
        progress: Progress,
        pipeline: Pipeline,
        train: Callable[[Selection], Updated],
    ) -> None:
        self._sampling, self._progress, self._pipeline, self._train = sampling, progress, pipeline, train
        self._rollouts, self._config = sampling.rollouts, sampling.config.rollout
        self._draws: dict[Key, Draw] = {}
        self._finished: dict[Draw, Group] = {}
        self._left_out: list[Group] = []
        self._update: Future[Updated] | None = None
        self._in_update: list[Draw] = []
        self._costs = Metrics()
        self._since_s = time.perf_counter()

    def submit(self, draws: Sequence[Draw]) -> None:
        """Start to sample; groups that were sampled for the same draws before are left out."""
        self._forget([draw for draw in draws if draw in self._finished])
        keys = [_key(draw) for draw in draws]
        self._draws |= zip(keys, draws, strict=True)
        self._rollouts.submit("train", [draw.prompt for draw in draws], self._config.group_size, keys)

    def drop(self, draws: Iterable[Draw]) -> None:
        """Leave finished groups out of training."""
        self._forget(list(draws))

    def _forget(self, draws: Sequence[Draw]) -> None:
        self._left_out += [self._finished.pop(draw) for draw in draws]
        self._rollouts.forget("train", [_key(draw) for draw in draws])

    def start_update(self, kept: Sequence[Draw], dropped: Mapping[Draw, str]) -> None:
        """Start the next round's update with the groups of `kept`, in a thread."""
        config, progress = self._config, self._progress
        progress.start_round()
        selection = Selection(
            config.filter,
            config.prompts_per_round,
            kept=[self._finished[draw] for draw in kept],
            dropped=[self._finished[draw] for draw in dropped],
            reasons=Counter(dropped.values()),
            num_batches=-(-(len(kept) + len(dropped)) // config.prompts_per_round),
        )
        self._sampling.show_outputs(progress.round, [*selection.kept, *selection.dropped])
        self._complete(selection)
        progress.metrics.merge(selection.metrics)
        self._in_update = [*kept, *dropped]
        self._update = in_thread(lambda: self._train(selection))

    def _complete(self, selection: Selection) -> None:
        """Complete a round's selection, with metrics of everything that was sampled for it and since the last
        one."""
        sampling, left_out, round_ = self._sampling, self._left_out, self._progress.round
        sampled = [*selection.kept, *selection.dropped, *left_out]
        metrics = selection.metrics
        metrics.merge(self._costs)
        now_s = time.perf_counter()
        metrics.add("time/rollout_s", now_s - self._since_s - metrics.value("pipeline/rollout_wait_s"))
        metrics.merge(sampling.check_round(round_, sampled))
        sampling.complete(selection, sampled, round_)
        metrics.merge(lag_metrics(selection, left_out, version=round_ - 1))
        self._costs, self._left_out, self._since_s = Metrics(), [], now_s

    def wait(self) -> None:
        """Wait until groups are finished or the update ends, or until the run is asked to stop. Raises the
        exception of a group or of the update."""
        progress = self._progress
        with nullcontext() if self._update else progress.reports.reporter.phase("rollout"):
            while not self._poll() and not progress.stop.is_requested:
                pass

    def _poll(self) -> bool:
        """Wait for a moment. Returns whether anything was reported to the pipeline."""
        start_s = time.perf_counter()
        rollouts, groups = self._rollouts, []
        is_sampling = bool(rollouts.running("train"))
        if is_sampling:
            groups, costs = rollouts.finished("train", _TICK_S if self._update else _IDLE_TICK_S)
            self._costs.merge(costs)
            for group in groups:
                self._finish(group)
        elif self._update is not None:
            wait([self._update], _IDLE_TICK_S)
        waited_s = time.perf_counter() - start_s
        self._costs.add("pipeline/trainer_wait_s", 0.0 if self._update else waited_s)
        self._costs.add("pipeline/rollout_wait_s", 0.0 if is_sampling else waited_s)
        if self._update is None or not self._update.done():
            return bool(groups)
        self._end_update(self._update)
        return True

    def _end_update(self, update: Future[Updated]) -> None:
        self._progress.end_update(*update.result())
        self._update = None
        self._pipeline.updated()
        self._rollouts.forget("train", [_key(draw) for draw in self._in_update])
        for draw in self._in_update:
            del self._finished[draw]

    def _finish(self, group: Group) -> None:
        draw = self._draws.pop(group.key)
        self._finished[draw] = group
        written = [version for t in group.sampled for version, _ in t.lengths.versions]
        version = min(written, default=self._pipeline.engine_version)
        self._pipeline.finished(draw, version, reason_to_drop(group, self._config.filter))

    @contextmanager
    def closing(self) -> Iterator[None]:
        """At the end of the block, cancel the running groups. After an error, wait for the update, which may
        fail too."""
        try:
            yield
        except Exception:
            if self._update is not None:
                wait([self._update])
            raise
        self._rollouts.cancel("train", self._rollouts.running("train"))


def _key(draw: Draw) -> Key:
    return (TRAIN_KEY, draw.round, draw.number)
