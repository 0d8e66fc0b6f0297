"""The rollout worker: samples groups, scores each as soon as its last member is sampled, and keeps the
trajectories until they are turned into rows. The driver (trainer.rollouts) names prompts by their index in
the data and receives only metadata; tokens leave as rows for training, or as whole trajectories for
reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from braid.checks import Sums, add_sums
from braid.checks.rollout import NUM_SCORES, rollout_sums, score_sums
from braid.cluster.loops import Loop, task_group
from braid.report.metrics import Metrics
from braid.rewards.scorer import Scorer
from braid.types import Group, Key, Lengths, Prompt, Row, ShapedReward, Spaces, Status, Trajectory

from .drivers.base import Driver
from .engine import Engine, NewWeights
from .rows import group_rows

if TYPE_CHECKING:
    from .engines.native.engine import NativeEngine

Use = Literal["train", "eval"]
"""Purpose of trajectories: each has its own prompts and sampling settings."""


class TrajectoryMetadata(NamedTuple):
    """Trajectory metadata, without tokens, texts and prompt; fields as in Trajectory. A tuple, because the
    driver receives one per trajectory and round, and tuples are cheap to serialise."""

    sample: int
    status: Status
    reason: str
    reward: float | None
    shaped: ShapedReward | None
    agent_rewards: dict[str, float]
    reward_parts: dict[str, float]
    metrics: dict[str, float]
    attempts: int
    known_lengths: Lengths

    @classmethod
    def of(cls, t: Trajectory) -> TrajectoryMetadata:
        rewards = (t.reward, t.shaped, t.agent_rewards, t.reward_parts)
        return cls(t.sample, t.status, t.reason, *rewards, t.metrics, t.attempts, t.lengths)


class GroupMetadata(NamedTuple):
    """Metadata of a group."""

    key: Key
    trajectories: tuple[TrajectoryMetadata, ...]
    greedy: TrajectoryMetadata | None

    def group(self, prompt: Prompt) -> Group:
        """The group with this metadata, without tokens and texts."""
        trajectories = [Trajectory(prompt, **metadata._asdict()) for metadata in self.trajectories]
        greedy = None if self.greedy is None else Trajectory(prompt, **self.greedy._asdict())
        return Group(prompt, trajectories, greedy, self.key)


class WeightReceiver(Protocol):
    """Receives new weights for an engine that does not read the trainer's tensors: the engine itself, or a
    weights.receiver.ModelReceiver."""

    @property
    def receivers(self) -> Sequence[str]:
        """Names by which the sender addresses it: one per process that holds weights."""
        ...

    def receive(self, version: int, ticket: Mapping[str, Any] | None) -> None:
        """Receive `version` from the sender of the ticket; None for a sender in this process. Raises
        EngineError if the data that arrives differs from the data that was sent."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Stream:
    """How groups of one use are sampled: `driver` plays episodes of `prompts`, of at most `limit` prompts at
    a time. `greedy` samples the greedy answer to each prompt, for recipes whose baseline is its reward.
    `shape` computes the reward used for training; None for the reward itself."""

    prompts: Sequence[Prompt]
    driver: Driver
    limit: int | None = None
    greedy: Driver | None = None
    shape: Callable[[Trajectory], ShapedReward] | None = None


@dataclass(frozen=True, slots=True)
class Opponent:
    """An engine that gets the weights of versions that are multiples of `every`; only the first ones if that
    is 0."""

    engine: NativeEngine
    every: int

    def is_due(self, version: int) -> bool:
        """Whether it gets the weights of `version`."""
        return version == 0 if self.every == 0 else version % self.every == 0


class _Groups:
    """The groups of one use. `ended` are the finished tasks that have not been reported; `news` is set when
    a task has ended."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.places = nullcontext() if stream.limit is None else asyncio.Semaphore(stream.limit)
        self.running: dict[Key, asyncio.Task[tuple[GroupMetadata, Metrics]]] = {}
        self.ended: dict[Key, asyncio.Task[tuple[GroupMetadata, Metrics]]] = {}
        self.news = asyncio.Event()
        self.whole: dict[Key, Group] = {}

    def end(self, key: Key) -> None:
        task = self.running.pop(key)
        if not task.cancelled():
            task.exception()  # only one is raised: asyncio shall not print the others
            self.ended[key] = task
        self.news.set()


class Collector:
    """Samples and scores groups, as many at a time as asked for. A group is identified by its use and key."""

    def __init__(  # noqa: PLR0913
        self,
        streams: Mapping[Use, Stream],
        engine: Engine,
        scorer: Scorer,
        *,
        receiver: WeightReceiver | None = None,
        check: Callable[[int], None] | None = None,
        close_envs: Callable[[], Awaitable[None]] | None = None,
        in_background: bool = False,
        opponent: Opponent | None = None,
        judges: Sequence[Engine] = (),
        spaces: Spaces | None = None,
        bos_id: int | None = None,
    ) -> None:
        """All drivers sample with `engine`. `receiver` receives new weights; None if the engine reads the
        trainer's tensors. `check` is called with each new version. `close_envs` ends what environments share.
        Sampling goes on `in_background`, or only while the caller waits for groups. `judges` are engines of
        judges in this process, which sleep, wake and close with `engine`. `spaces` are a simulator's.
        `bos_id` is the token that contexts of text begin with, if there is one."""
        self._groups: dict[Use, _Groups] = {use: _Groups(stream) for use, stream in streams.items()}
        self._engine, self._scorer, self._receiver, self._check = engine, scorer, receiver, check
        self._close_envs, self._opponent, self._judges = close_envs, opponent, judges
        self._opponent_version, self._spaces, self._bos_id = 0, spaces, bos_id
        self._row_sums: Sums = {}
        self._loop = Loop(in_background=in_background)

    def submit(self, use: Use, prompts: Sequence[int], group_size: int, keys: Sequence[Key]) -> None:
        """Start to sample and score a group for each of `prompts` (indices into the data of `use`); the
        random numbers of each depend only on its key."""

        async def start() -> None:
            groups = self._groups[use]
            for place, key in zip(prompts, keys, strict=True):
                assert key not in groups.running, f"group {key} is running"
                group = self._group(groups, groups.stream.prompts[place], group_size, key)
                groups.running[key] = task = asyncio.create_task(group)
                task.add_done_callback(lambda _, key=key: groups.end(key))

        self._loop.run(start())

    def finished(self, use: Use) -> tuple[list[GroupMetadata], Metrics]:
        """Wait until groups are scored that have not been reported, unless none runs. Returns their metadata
        and the metrics of scoring. Raises the exception of a group that failed."""
        return self._loop.run(self._finished(self._groups[use]))

    async def _finished(self, groups: _Groups) -> tuple[list[GroupMetadata], Metrics]:
        while groups.running and not groups.ended:
            groups.news.clear()
            await groups.news.wait()
        ended, groups.ended = groups.ended, {}
        metrics = Metrics()
        metadata: list[GroupMetadata] = []
        for task in ended.values():
            group, cost = task.result()
            metadata.append(group)
            metrics.merge(cost)
        return metadata, metrics

    async def _group(
        self, groups: _Groups, prompt: Prompt, group_size: int, key: Key
    ) -> tuple[GroupMetadata, Metrics]:
        """Sample, score and shape a group."""
        stream = groups.stream
        greedy: asyncio.Task[Group] | None = None
        async with groups.places, task_group() as tasks:
            sampled = tasks.create_task(stream.driver.group(prompt, group_size, key))
            if stream.greedy is not None:
                greedy = tasks.create_task(stream.greedy.group(prompt, 1, key))
        group = sampled.result()
        group.key = key
        if greedy is not None:
            (group.greedy,) = greedy.result().trajectories
        start = time.perf_counter()
        metrics = await self._scorer.score(group.sampled)
        metrics.add("time/score_s", time.perf_counter() - start)
        if stream.shape is not None:
            for trajectory in group.sampled:
                if trajectory.is_valid:
                    trajectory.shaped = stream.shape(trajectory)
        groups.whole[key] = group
        return metadata_of(group), metrics

    def cancel(self, use: Use, keys: Sequence[Key]) -> None:
        """Cancel and drop groups; returns when their environments are closed. None of them will be
        reported."""

        async def cancel() -> None:
            groups = self._groups[use]
            tasks = [groups.running[key] for key in keys if key in groups.running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for key in keys:
                groups.ended.pop(key, None)
                groups.whole.pop(key, None)

        self._loop.run(cancel())

    def rows(self, kept: Sequence[tuple[Key, int, int]]) -> list[Row]:
        """Training rows of groups, given as (key, place, first); see rows.group_rows."""
        groups, rows = self._groups["train"].whole, list[Row]()
        self._row_sums = {}
        for key, place, first in kept:
            made = group_rows(groups[key], place, first)
            add_sums(self._row_sums, rollout_sums(groups[key], made, self._bos_id))
            rows += made
        return rows

    def check_sums(self, keys: Sequence[Key]) -> Sums:
        """Sums for the checks of the loop: over the rows that were made last, and over trajectories of the
        groups `keys` that are scored again, each alone."""
        groups = self._groups["train"].whole
        valid = [t for key in keys for t in groups[key].valid[:NUM_SCORES]][:NUM_SCORES]
        again = [replace(t, reward=None, reward_parts={}, shaped=None) for t in valid]

        async def score() -> None:
            for trajectory in again:
                await self._scorer.score([trajectory])

        self._loop.run(score())
        return {**self._row_sums, **score_sums(valid, again)}

    def whole(self, use: Use, keys: Sequence[Key]) -> list[Group]:
        """Whole groups, with tokens and texts."""
        return [self._groups[use].whole[key] for key in keys]

    def forget(self, use: Use, keys: Sequence[Key]) -> None:
        """Drop finished groups."""
        for key in keys:
            self._groups[use].whole.pop(key, None)

    def set_weights(
        self, version: int, when: NewWeights = "drain", ticket: Mapping[str, Any] | None = None
    ) -> None:
        """See Engine.set_weights. The receiver gets the weights from the sender of `ticket`; without one they
        are the trainer's own tensors."""
        load = None if self._receiver is None else partial(self._receiver.receive, version, ticket)
        self._loop.run(self._engine.set_weights(version, when, load))
        if self._opponent is not None and self._opponent.is_due(version):
            self._set_opponent(self._opponent.engine, version, when)
        if self._check is not None:
            self._check(version)

    def _set_opponent(self, engine: NativeEngine, version: int, when: NewWeights = "drain") -> None:
        """Give the opponent's engine the weights of the policy's."""
        self._opponent_version = version
        self._loop.run(engine.set_weights(version, when))

    def spaces(self) -> Spaces:
        """Observation and action spaces of the simulator."""
        assert self._spaces is not None, "the run has no simulator"
        return self._spaces

    def opponent_state(self) -> dict[str, Any] | None:
        """The opponent's weights and their version; None without one."""
        if self._opponent is None:
            return None
        named = self._opponent.engine.named_parameters()
        weights = {name: weight.detach().cpu() for name, weight in named}
        return {"version": self._opponent_version, "weights": weights}

    def load_opponent(self, state: Mapping[str, Any]) -> None:
        """Restore an `opponent_state`."""
        assert self._opponent is not None, "the run has no opponents"
        self._set_opponent(self._opponent.engine, state["version"])
        for name, weight in self._opponent.engine.named_parameters():
            weight.copy_(state["weights"][name])

    def receivers(self) -> Sequence[str]:
        """Names by which a sender addresses this worker's engine."""
        assert self._receiver is not None, "the engine reads the trainer's own weights"
        return self._receiver.receivers

    @property
    def _engines(self) -> list[Engine]:
        return [self._engine, *([] if self._opponent is None else [self._opponent.engine]), *self._judges]

    def cache_bytes(self) -> int:
        return sum(engine.cache_bytes for engine in self._engines)

    def sleep(self) -> None:
        for engine in self._engines:
            engine.sleep()

    def wake(self) -> None:
        for engine in self._engines:
            engine.wake()

    def close(self) -> None:
        """Cancel all groups, and stop the engine, the environments, and the scorer's processes."""
        for use, groups in self._groups.items():
            self.cancel(use, list(groups.running))

        async def stop() -> None:
            for engine in self._engines:
                engine.close()
            if self._close_envs is not None:
                await self._close_envs()

        self._loop.run(stop())
        if self._receiver is not None:
            self._receiver.close()
        self._scorer.close()
        self._loop.close()


def metadata_of(group: Group) -> GroupMetadata:
    greedy = None if group.greedy is None else TrajectoryMetadata.of(group.greedy)
    return GroupMetadata(group.key, tuple(TrajectoryMetadata.of(t) for t in group.trajectories), greedy)
