"""What a rollout worker is: it samples groups, scores them, and keeps what was sampled until rows are made of it.

One object in the process of the engine that it samples with; nothing of it knows whether there are others. The controller
(controller.rollouts) names prompts by their place in the data and learns facts: how each trajectory ended, its rewards,
its lengths. Tokens leave only as rows, for whoever trains on them, or as whole trajectories for reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from braid.report.metrics import Metrics
from braid.rewards.scorer import Scorer
from braid.types import Group, Lengths, Prompt, Row, ShapedReward, Status, Trajectory

from .drivers.base import Driver
from .rows import group_rows

Use = Literal["train", "eval"]
"""What trajectories are for: each use has its prompts and its way to sample them."""


class Facts(NamedTuple):
    """A Trajectory without what was said in it and without its prompt; members as there. There is one for each, every round, for
    the controller to take in: tuples are quick to send."""

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
        """The trajectory that these are of, as far as is known."""
        return Trajectory(prompt, **self._asdict())


class GroupFacts(NamedTuple):
    """Those of a group, told apart by its `number`."""

    number: int
    trajectories: tuple[Facts, ...]
    greedy: Facts | None

    def group(self, prompt: Prompt) -> Group:
        """The group that these are of, as far as is known."""
        greedy = None if self.greedy is None else self.greedy.trajectory(prompt)
        return Group(prompt, [facts.trajectory(prompt) for facts in self.trajectories], greedy, self.number)


class WeightLink(Protocol):
    """How weights from other processes reach an engine."""

    @property
    def names(self) -> Sequence[str]:
        """What a sender knows the engine by: a name for each process of it that has weights."""
        ...

    def take(self, version: int, ticket: Mapping[str, Any]) -> None:
        """Take over `version` from the sender that the ticket is of. Raises EngineError when something else arrives than was
        sent."""
        ...

    def close(self) -> None: ...


class Collector:
    """Drivers, a scorer, and the groups of the round."""

    def __init__(
        self,
        prompts: Mapping[Use, Sequence[Prompt]],
        drivers: Mapping[Use, Driver],
        greedy: Driver | None,
        scorer: Scorer,
        *,
        shape: Callable[[Trajectory], ShapedReward] | None,
        link: WeightLink | None = None,
    ) -> None:
        """`greedy` takes the likeliest answer to each training prompt, where its reward is the baseline. `shape` is what
        training makes of a reward, None where it makes nothing. `link` brings new weights; None where the engine reads the
        trainer's own."""
        self._prompts, self._drivers, self._greedy = prompts, drivers, greedy
        self._scorer, self._shape, self._link = scorer, shape, link
        self._loop = asyncio.Runner()
        self._groups: dict[int, Group] = {}
        self._unscored: list[Group] = []

    def collect(
        self, use: Use, prompts: Sequence[int], group_size: int, key: tuple[int, ...], numbers: Sequence[int]
    ) -> None:
        """Sample a group for each of `prompts` (places in the data of `use`); `key` and `numbers` as in Driver.run. The
        numbers are those that the groups are called by from then on."""
        drawn = [self._prompts[use][i] for i in prompts]
        groups = self._loop.run(self._drivers[use].run(drawn, group_size, key=key, numbers=numbers))
        if use == "train" and self._greedy is not None:
            answers = self._loop.run(self._greedy.run(drawn, 1, key=key, numbers=numbers))
            for group, answer in zip(groups, answers, strict=True):
                (group.greedy,) = answer.trajectories
        for number, group in zip(numbers, groups, strict=True):
            group.number = number
            self._groups[number] = group
        self._unscored += groups

    def score(self, use: Use) -> tuple[list[GroupFacts], Metrics]:
        """Give the trajectories that were collected since the last call their rewards, and those for training what training
        makes of them. Returns the facts of their groups, and what scoring cost."""
        groups, self._unscored = self._unscored, []
        sampled = [t for group in groups for t in group.sampled]
        metrics = self._loop.run(self._scorer.score(sampled))
        if use == "train" and self._shape is not None:
            for trajectory in sampled:
                if trajectory.is_valid:
                    trajectory.shaped = self._shape(trajectory)
        return [_facts_of(group) for group in groups], metrics

    def rows(self, kept: Sequence[tuple[int, int, int]]) -> list[Row]:
        """Training rows of groups: (number, place, first) of each, see rows.group_rows."""
        return [
            row for number, place, first in kept for row in group_rows(self._groups[number], place, first)
        ]

    def whole(self, numbers: Sequence[int]) -> list[Group]:
        """Groups with all that was said in them."""
        return [self._groups[number] for number in numbers]

    def forget(self) -> None:
        """Let go of all groups."""
        self._groups, self._unscored = {}, []

    def publish(self, version: int) -> None:
        """Sample from the policy's weights as they are now, as `version`."""
        for driver in self._all_drivers():
            driver.publish(version)

    def receivers(self) -> Sequence[str]:
        """See WeightLink.names."""
        assert self._link is not None, "the engine reads the trainer's own weights"
        return self._link.names

    def take_weights(self, version: int, ticket: Mapping[str, Any]) -> None:
        """Sample from what the sender of `ticket` gives, as `version`."""
        assert self._link is not None, "the engine reads the trainer's own weights"
        self._link.take(version, ticket)
        self.publish(version)

    def cache_bytes(self) -> int:
        """Memory of the engine's key/value cache in this process."""
        return self._drivers["train"].cache_bytes

    def sleep(self) -> None:
        """Give back what the engine can spare of its device until `wake`."""
        self._drivers["train"].sleep()

    def wake(self) -> None:
        """Be ready to sample, and to score what was sampled."""
        self._drivers["train"].wake()

    def close(self) -> None:
        """End the engine, the environments, and the scorer's processes."""
        for driver in self._all_drivers():
            driver.close()
        if self._link is not None:
            self._link.close()
        self._scorer.close()
        self._loop.close()

    def _all_drivers(self) -> list[Driver]:
        return [*self._drivers.values(), *([] if self._greedy is None else [self._greedy])]


def _facts_of(group: Group) -> GroupFacts:
    greedy = None if group.greedy is None else Facts.of(group.greedy)
    return GroupFacts(group.number, tuple(Facts.of(t) for t in group.trajectories), greedy)
