"""The groups of the pipelined loop, from their submission to the end of the update that trains on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext

from braid.cluster.loops import in_thread
from braid.report.metrics import Metrics
from braid.types import Group, Key

from . import steps
from .keys import TRAIN_KEY
from .parts import Parts
from .pipeline import Draw, Pipeline
from .selection import Selection, reason_to_drop

_TICK_S, _IDLE_TICK_S = 0.02, 0.5
"""How long to wait for groups, in seconds, while an update runs, whose end has to be noticed, and otherwise."""


class GroupsInFlight:
    """Samples and trains as `pipeline` decides, and reports to it. Only the thread of the update uses
    `parts.metrics` and the models while it runs."""

    def __init__(self, parts: Parts, pipeline: Pipeline) -> None:
        self._parts, self._pipeline = parts, pipeline
        self._draws: dict[Key, Draw] = {}
        self._finished: dict[Draw, Group] = {}
        self._left_out: list[Group] = []
        self._update: Future[None] | None = None
        self._in_update: list[Draw] = []
        self._costs = Metrics()
        self._since_s = time.perf_counter()

    def submit(self, draws: Sequence[Draw]) -> None:
        """Start to sample; groups that were sampled for the same draws before are left out."""
        self._forget([draw for draw in draws if draw in self._finished])
        keys = [_key(draw) for draw in draws]
        self._draws |= zip(keys, draws, strict=True)
        size = self._parts.config.rollout.group_size
        self._parts.rollouts.submit("train", [draw.prompt for draw in draws], size, keys)

    def drop(self, draws: Iterable[Draw]) -> None:
        """Leave finished groups out of training."""
        self._forget(list(draws))

    def _forget(self, draws: Sequence[Draw]) -> None:
        self._left_out += [self._finished.pop(draw) for draw in draws]
        self._parts.rollouts.forget("train", [_key(draw) for draw in draws])

    def start_update(self, kept: Sequence[Draw], dropped: Mapping[Draw, str]) -> None:
        """Start the next round's update with the groups of `kept`, in a thread."""
        parts, config = self._parts, self._parts.config.rollout
        parts.progress.round += 1
        selection = Selection(
            config.filter,
            config.prompts_per_round,
            kept=[self._finished[draw] for draw in kept],
            dropped=[self._finished[draw] for draw in dropped],
            reasons=Counter(dropped.values()),
            num_batches=-(-(len(kept) + len(dropped)) // config.prompts_per_round),
        )
        steps.show_outputs(parts, [*selection.kept, *selection.dropped])
        self._report(selection)
        self._in_update = [*kept, *dropped]

        def update() -> None:
            with parts.stop.finishing():
                steps.train(parts, selection, steps.fetch_rows(parts, selection))

        self._update = in_thread(update)

    def _report(self, selection: Selection) -> None:
        """Record metrics of everything that was sampled for the round and since the last one."""
        parts, left_out = self._parts, self._left_out
        sampled = [*selection.kept, *selection.dropped, *left_out]
        metrics = parts.metrics
        metrics.merge(self._costs)
        now_s = time.perf_counter()
        metrics.add("time/rollout_s", now_s - self._since_s - metrics.value("pipeline/rollout_wait_s"))
        steps.check_round(parts, sampled)
        steps.report_sampling(parts, selection, sampled)
        version = parts.progress.round - 1
        lags = Counter[int]()
        for trajectory in (t for group in selection.kept for t in group.valid):
            for written, num in trajectory.lengths.versions:
                lags[version - written] += num
        total = lags.total()
        metrics.mean("pipeline/lag_mean", sum(lag * num for lag, num in lags.items()), max(1, total))
        metrics.max("pipeline/lag_max", max(lags, default=0))
        for lag, num in lags.items():
            metrics.mean(f"pipeline/lag_share/{lag}", num, total)
        unused = (t for group in (*selection.dropped, *left_out) for t in group.sampled)
        metrics.add("pipeline/dropped_tokens", sum(t.num_output_tokens for t in unused))
        metrics.add("pipeline/left_out_groups", len(left_out))
        self._costs, self._left_out, self._since_s = Metrics(), [], now_s

    def wait(self) -> None:
        """Wait until groups are finished or the update ends, or until the run is asked to stop. Raises the exception
        of a group or of the update."""
        with nullcontext() if self._update else self._parts.reporter.phase("rollout"):
            while not self._poll() and not self._parts.stop.is_requested:
                pass

    def _poll(self) -> bool:
        """Wait for a moment. Returns whether anything was reported to the pipeline."""
        start_s = time.perf_counter()
        rollouts, groups = self._parts.rollouts, []
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

    def _end_update(self, update: Future[None]) -> None:
        update.result()
        self._update = None
        self._pipeline.updated()
        self._parts.rollouts.forget("train", [_key(draw) for draw in self._in_update])
        for draw in self._in_update:
            del self._finished[draw]

    def _finish(self, group: Group) -> None:
        draw = self._draws.pop(group.key)
        self._finished[draw] = group
        written = [version for t in group.sampled for version, _ in t.lengths.versions]
        version = min(written, default=self._pipeline.engine_version)
        self._pipeline.finished(draw, version, reason_to_drop(group, self._parts.config.rollout.filter))

    @contextmanager
    def closing(self) -> Iterator[None]:
        """At the end of the block, cancel the running groups. After an error, wait for the update, which may fail
        too."""
        try:
            yield
        except Exception:
            if self._update is not None:
                wait([self._update])
            raise
        self._parts.rollouts.cancel("train", self._parts.rollouts.running("train"))


def _key(draw: Draw) -> Key:
    return (TRAIN_KEY, draw.round, draw.number)
