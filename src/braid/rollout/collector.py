"""The rollout worker: samples groups, scores each as soon as its last member is sampled, and keeps the
trajectories until they are turned into rows. The driver (trainer.rollouts) names prompts by their index in
the data and receives only metadata; tokens leave as rows for training, or as whole trajectories for
reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from braid.cluster.loops import Loop, task_group
from braid.report.metrics import Metrics
from braid.rewards.scorer import Scorer
from braid.types import Group, Key, Lengths, Prompt, Row, ShapedReward, Spaces, Status, Trajectory

from .drivers.base import Driver
from .engine import Engine, NewWeights
from .rows import group_rows

if TYPE_CHECKING:
    from .engines.native import NativeEngine

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
        given = (t.reward, t.shaped, t.agent_rewards, t.reward_parts)
        return cls(t.sample, t.status, t.reason, *given, t.metrics, t.attempts, t.lengths)


class GroupMetadata(NamedTuple):
    """Metadata of a group."""

    key: Key
    trajectories: tuple[TrajectoryMetadata, ...]
    greedy: TrajectoryMetadata | None

    def group(self, prompt: Prompt) -> Group:
        """The group with this metadata, without tokens and texts."""
        trajectories = [Trajectory(prompt, **of._asdict()) for of in self.trajectories]
        greedy = None if self.greedy is None else Trajectory(prompt, **self.greedy._asdict())
        return Group(prompt, trajectories, greedy, self.key)


class WeightLink(Protocol):
    """Brings new weights to an engine that does not read the trainer's tensors."""

    @property
    def names(self) -> Sequence[str]:
        """Names by which the sender addresses the engine: one per engine process that holds weights."""
        ...

    def take(self, version: int, ticket: Mapping[str, Any] | None) -> None:
        """Receive `version` from the sender of the ticket; None for a sender in this process. Raises
        EngineError if the data that arrives differs from the data that was sent."""
        ...

    def close(self) -> None: ...


class _Stream:
    """The groups of one use. `ended` are the finished tasks that have not been reported; `news` is set when
    a task has ended."""

    def __init__(self, prompts: Sequence[Prompt], driver: Driver, limit: int | None) -> None:
        self.prompts, self.driver = prompts, driver
        self.places = nullcontext() if limit is None else asyncio.Semaphore(limit)
        self.running: dict[Key, asyncio.Task[tuple[GroupMetadata, Metrics]]] = {}
        self.ended: dict[Key, asyncio.Task[tuple[GroupMetadata, Metrics]]] = {}
        self.news = asyncio.Event()
        self.groups: dict[Key, Group] = {}

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
        prompts: Mapping[Use, Sequence[Prompt]],
        drivers: Mapping[Use, Driver],
        greedy: Driver | None,
        engine: Engine,
        scorer: Scorer,
        *,
        shape: Callable[[Trajectory], ShapedReward] | None,
        limits: Mapping[Use, int | None] = MappingProxyType({}),
        link: WeightLink | None = None,
        check: Callable[[int], None] | None = None,
        close_envs: Callable[[], Awaitable[None]] | None = None,
        in_background: bool = False,
        opponent: NativeEngine | None = None,
        opponent_every: int = 0,
        spaces: Spaces | None = None,
    ) -> None:
        """`greedy` samples the greedy answer to each training prompt, for recipes whose baseline is its
        reward. All drivers sample with `engine`. `shape` computes the reward used for training; None for the
        reward itself. `limits` are the numbers of prompts that are sampled at a time. `link` receives new
        weights; None if the engine reads the trainer's tensors. `check` is called with each new version.
        `close_envs` ends what environments share. Sampling goes on `in_background`, or only while the caller
        waits for groups. `opponent` gets the weights of versions that are multiples of `opponent_every`; only
        the first ones if that is 0. `spaces` are a simulator's."""
        self._streams: dict[Use, _Stream] = {
            use: _Stream(prompts[use], drivers[use], limits.get(use)) for use in drivers
        }
        self._greedy, self._engine = greedy, engine
        self._scorer, self._shape, self._link, self._check = scorer, shape, link, check
        self._close_envs, self._opponent, self._opponent_every = close_envs, opponent, opponent_every
        self._opponent_version, self._spaces = 0, spaces
        self._loop = Loop(in_background=in_background)

    def submit(self, use: Use, prompts: Sequence[int], group_size: int, keys: Sequence[Key]) -> None:
        """Start to sample and score a group for each of `prompts` (indices into the data of `use`); the
        random numbers of each depend only on its key."""

        async def start() -> None:
            stream = self._streams[use]
            for place, key in zip(prompts, keys, strict=True):
                assert key not in stream.running, f"group {key} is running"
                group = self._group(use, stream.prompts[place], group_size, key)
                stream.running[key] = task = asyncio.create_task(group)
                task.add_done_callback(lambda _, key=key: stream.end(key))

        self._loop.run(start())

    def finished(self, use: Use) -> tuple[list[GroupMetadata], Metrics]:
        """Wait until groups are scored that have not been reported, unless none runs. Returns their metadata
        and the metrics of scoring. Raises the exception of a group that failed."""
        return self._loop.run(self._finished(self._streams[use]))

    async def _finished(self, stream: _Stream) -> tuple[list[GroupMetadata], Metrics]:
        while stream.running and not stream.ended:
            stream.news.clear()
            await stream.news.wait()
        ended, stream.ended = stream.ended, {}
        metrics = Metrics()
        metadata: list[GroupMetadata] = []
        for task in ended.values():
            of, cost = task.result()
            metadata.append(of)
            metrics.merge(cost)
        return metadata, metrics

    async def _group(
        self, use: Use, prompt: Prompt, group_size: int, key: Key
    ) -> tuple[GroupMetadata, Metrics]:
        """Sample, score and shape a group."""
        stream = self._streams[use]
        greedy: asyncio.Task[Group] | None = None
        async with stream.places, task_group() as tasks:
            sampled = tasks.create_task(stream.driver.group(prompt, group_size, key))
            if use == "train" and self._greedy is not None:
                greedy = tasks.create_task(self._greedy.group(prompt, 1, key))
        group = sampled.result()
        group.key = key
        if greedy is not None:
            (group.greedy,) = greedy.result().trajectories
        start = time.perf_counter()
        metrics = await self._scorer.score(group.sampled)
        metrics.add("time/score_s", time.perf_counter() - start)
        if use == "train" and self._shape is not None:
            for trajectory in group.sampled:
                if trajectory.is_valid:
                    trajectory.shaped = self._shape(trajectory)
        stream.groups[key] = group
        return metadata_of(group), metrics

    def cancel(self, use: Use, keys: Sequence[Key]) -> None:
        """Cancel and drop groups; returns when their environments are closed. None of them will be
        reported."""

        async def cancel() -> None:
            stream = self._streams[use]
            tasks = [stream.running[key] for key in keys if key in stream.running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for key in keys:
                stream.ended.pop(key, None)
                stream.groups.pop(key, None)

        self._loop.run(cancel())

    def rows(self, kept: Sequence[tuple[Key, int, int]]) -> list[Row]:
        """Training rows of groups, given as (key, place, first); see rows.group_rows."""
        groups = self._streams["train"].groups
        return [row for key, place, first in kept for row in group_rows(groups[key], place, first)]

    def whole(self, use: Use, keys: Sequence[Key]) -> list[Group]:
        """Whole groups, with tokens and texts."""
        return [self._streams[use].groups[key] for key in keys]

    def forget(self, use: Use, keys: Sequence[Key]) -> None:
        """Drop finished groups."""
        for key in keys:
            self._streams[use].groups.pop(key, None)

    def set_weights(
        self, version: int, when: NewWeights = "drain", ticket: Mapping[str, Any] | None = None
    ) -> None:
        """See Engine.set_weights. The weights come through the link, from the sender of `ticket`; without a
        link they are the trainer's own tensors."""
        load = None if self._link is None else partial(self._link.take, version, ticket)
        self._loop.run(self._engine.set_weights(version, when, load))
        if version % (self._opponent_every or max(1, version + 1)) == 0:
            self._set_opponent(version, when)
        if self._check is not None:
            self._check(version)

    def _set_opponent(self, version: int, when: NewWeights = "drain") -> None:
        """Give the opponent the engine's weights."""
        if self._opponent is not None:
            self._opponent_version = version
            self._loop.run(self._opponent.set_weights(version, when))

    def spaces(self) -> Spaces:
        """Those of the simulator."""
        assert self._spaces is not None, "the run has no simulator"
        return self._spaces

    def opponent_state(self) -> dict[str, Any] | None:
        """The opponent's weights and their version; None without one."""
        if self._opponent is None:
            return None
        weights = {name: weight.detach().cpu() for name, weight in self._opponent.named_parameters()}
        return {"version": self._opponent_version, "weights": weights}

    def load_opponent(self, state: Mapping[str, Any]) -> None:
        """Restore an `opponent_state`."""
        assert self._opponent is not None, "the run has no opponents"
        self._set_opponent(state["version"])
        for name, weight in self._opponent.named_parameters():
            weight.copy_(state["weights"][name])

    def receivers(self) -> Sequence[str]:
        """See WeightLink.names."""
        assert self._link is not None, "the engine reads the trainer's own weights"
        return self._link.names

    @property
    def _engines(self) -> list[Engine]:
        return [self._engine, *([] if self._opponent is None else [self._opponent])]

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
        for use, stream in self._streams.items():
            self.cancel(use, list(stream.running))

        async def stop() -> None:
            for engine in self._engines:
                engine.close()
            if self._close_envs is not None:
                await self._close_envs()

        self._loop.run(stop())
        if self._link is not None:
            self._link.close()
        self._scorer.close()
        self._loop.close()


def metadata_of(group: Group) -> GroupMetadata:
    greedy = None if group.greedy is None else TrajectoryMetadata.of(group.greedy)
    return GroupMetadata(group.key, tuple(TrajectoryMetadata.of(t) for t in group.trajectories), greedy)
