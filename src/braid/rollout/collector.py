"""The rollout worker: samples groups, scores them, and keeps the trajectories until they are turned into
rows.

One object in the engine's process, independent of how many others there are. The controller
(controller.rollouts) names prompts by their index in the data and receives metadata: each trajectory's
status, rewards and lengths. Tokens leave only as rows for training, or as whole trajectories for reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from braid.report.metrics import Metrics
from braid.rewards.scorer import Scorer
from braid.runtime.loops import Loop, all_of
from braid.types import Group, Lengths, Prompt, Row, ShapedReward, Status, Trajectory

from .drivers.base import Driver
from .engine import Engine
from .rows import group_rows

Use = Literal["train", "eval"]
"""Purpose of trajectories: each has its own prompts and sampling settings."""


class Facts(NamedTuple):
    """Trajectory metadata, without tokens, texts and prompt; fields as in Trajectory. A tuple, because the
    controller receives one per trajectory and round, and tuples are cheap to serialise."""

    sample: int
    status: Status
    reason: str
    reward: float | None
    shaped: ShapedReward | None
    reward_parts: dict[str, float]
    facts: dict[str, float]
    attempts: int
    known_lengths: Lengths

    @classmethod
    def of(cls, t: Trajectory) -> Facts:
        told = (t.sample, t.status, t.reason, t.reward, t.shaped, t.reward_parts, t.facts, t.attempts)
        return cls(*told, t.lengths)

    def trajectory(self, prompt: Prompt) -> Trajectory:
        """The trajectory with this metadata, without tokens and texts."""
        return Trajectory(prompt, **self._asdict())


class GroupFacts(NamedTuple):
    """Metadata of a group, identified by its `number`."""

    number: int
    trajectories: tuple[Facts, ...]
    greedy: Facts | None

    def group(self, prompt: Prompt) -> Group:
        """The group with this metadata, without tokens and texts."""
        greedy = None if self.greedy is None else self.greedy.trajectory(prompt)
        return Group(prompt, [facts.trajectory(prompt) for facts in self.trajectories], greedy, self.number)


class WeightLink(Protocol):
    """Receives weights from another process for an engine."""

    @property
    def names(self) -> Sequence[str]:
        """Names by which the sender addresses the engine: one per engine process that holds weights."""
        ...

    def take(self, version: int, ticket: Mapping[str, Any]) -> None:
        """Receive `version` from the sender of the ticket. Raises EngineError if the data that arrives
        differs from the data that was sent."""
        ...

    def close(self) -> None: ...


class Collector:
    """Drivers, a scorer, and the groups of the current round."""

    def __init__(
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
    ) -> None:
        """`greedy` samples the greedy answer to each training prompt, for recipes whose baseline is its
        reward. All drivers sample with `engine`. `shape` computes the reward used for training; None for the
        reward itself. `limits` are the numbers of prompts that are sampled at a time. `link` receives new
        weights; None if the engine reads the trainer's tensors."""
        self._prompts, self._drivers, self._greedy, self._engine = prompts, drivers, greedy, engine
        self._scorer, self._shape, self._limits, self._link = scorer, shape, limits, link
        self._loop = Loop()
        self._groups: dict[int, Group] = {}
        self._unscored: list[Group] = []

    def collect(
        self, use: Use, prompts: Sequence[int], group_size: int, key: tuple[int, ...], numbers: Sequence[int]
    ) -> None:
        """Sample a group for each of `prompts` (indices into the data of `use`); the random
        numbers of each depend only on `key` and its number, which identifies the group from then on."""
        drawn = [self._prompts[use][i] for i in prompts]
        limit = self._limits.get(use)
        places = asyncio.Semaphore(len(drawn) if limit is None else limit)

        async def sample(prompt: Prompt, number: int) -> Group:
            async with places:
                group = await self._drivers[use].group(prompt, group_size, (*key, number))
                if use == "train" and self._greedy is not None:
                    (group.greedy,) = (await self._greedy.group(prompt, 1, (*key, number))).trajectories
            group.number = number
            return group

        groups = self._loop.run(all_of(map(sample, drawn, numbers)))
        self._groups |= zip(numbers, groups, strict=True)
        self._unscored += groups

    def score(self, use: Use) -> tuple[list[GroupFacts], Metrics]:
        """Score the trajectories collected since the last call, and shape the rewards of those for training.
        Returns the metadata of their groups and the metrics of scoring."""
        groups, self._unscored = self._unscored, []
        sampled = [t for group in groups for t in group.sampled]
        metrics = self._loop.run(self._scorer.score(sampled))
        if use == "train" and self._shape is not None:
            for trajectory in sampled:
                if trajectory.is_valid:
                    trajectory.shaped = self._shape(trajectory)
        return [_facts_of(group) for group in groups], metrics

    def rows(self, kept: Sequence[tuple[int, int, int]]) -> list[Row]:
        """Training rows of groups, given as (number, place, first); see rows.group_rows."""
        return [
            row for number, place, first in kept for row in group_rows(self._groups[number], place, first)
        ]

    def whole(self, numbers: Sequence[int]) -> list[Group]:
        """Whole groups, with tokens and texts."""
        return [self._groups[number] for number in numbers]

    def forget(self) -> None:
        """Drop all groups."""
        self._groups, self._unscored = {}, []

    def set_weights(self, version: int, ticket: Mapping[str, Any] | None = None) -> None:
        """See Engine.set_weights. The weights come from the sender of `ticket`; without one they are those that
        the engine has received already, or the trainer's own tensors."""
        load = None
        if ticket is not None:
            assert self._link is not None, "the engine reads the trainer's own weights"
            load = partial(self._link.take, version, ticket)
        self._loop.run(self._engine.set_weights(version, load=load))

    def receivers(self) -> Sequence[str]:
        """See WeightLink.names."""
        assert self._link is not None, "the engine reads the trainer's own weights"
        return self._link.names

    def cache_bytes(self) -> int:
        """See Engine."""
        return self._engine.cache_bytes

    def sleep(self) -> None:
        """See Engine."""
        self._engine.sleep()

    def wake(self) -> None:
        """See Engine."""
        self._engine.wake()

    def close(self) -> None:
        """Stop the engine, the environments, and the scorer's processes."""
        self._engine.close()
        if self._link is not None:
            self._link.close()
        self._scorer.close()
        self._loop.close()


def _facts_of(group: Group) -> GroupFacts:
    greedy = None if group.greedy is None else Facts.of(group.greedy)
    return GroupFacts(group.number, tuple(Facts.of(t) for t in group.trajectories), greedy)
