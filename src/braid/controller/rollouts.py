"""The rollout workers as the loops see them: prompts are shared out, facts come back, tokens stay where they are.

One way for one process and for many. A prompt's random numbers hang on its number alone (rollout.drivers), so it changes no
result which worker samples it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from braid.report.metrics import Metrics
from braid.rollout.collector import GroupFacts, Use
from braid.runtime.workers import Ref, WorkerGroup
from braid.types import Group, Prompt


class Publisher(Protocol):
    """Brings the policy's weights to engines."""

    def send(self, version: int) -> None:
        """Have every engine sample from the policy's weights as they are now, as `version`."""
        ...


@dataclass(slots=True)
class Rollouts:
    """Workers that run a Collector each. `publication` brings them weights; None where the engine reads the policy's own."""

    workers: WorkerGroup
    prompts: Mapping[Use, Sequence[Prompt]]
    publication: Publisher | None = None
    in_turns: Sequence[int] = ()
    """Ranks of workers whose devices models are trained on too."""
    _homes: dict[int, int] = field(default_factory=dict)
    """The worker that has each group, by the group's number."""
    _prompts: dict[int, Prompt] = field(default_factory=dict)

    def collect(
        self,
        use: Use,
        places: Sequence[int],
        group_size: int,
        *,
        key: tuple[int, ...],
        numbers: Sequence[int],
    ) -> None:
        """Sample a group for each of the prompts at `places`; `key` and `numbers` as in Driver.run."""
        prompts = self.prompts[use]
        lengths = [len(prompts[i].token_ids) for i in places]
        shares = least_load(lengths, self.workers.size)
        for rank, share in enumerate(shares):
            for i in share:
                self._homes[numbers[i]], self._prompts[numbers[i]] = rank, prompts[places[i]]
        self.workers.scatter(
            "collect",
            [(use, [places[i] for i in s], group_size, key, [numbers[i] for i in s]) for s in shares],
        )

    def score(self, use: Use, numbers: Sequence[int]) -> tuple[list[Group], Metrics]:
        """Reward what was collected last. Returns its groups, those of `numbers` in that order, without what was said in
        them; and what scoring cost."""
        metrics = Metrics()
        told: dict[int, GroupFacts] = {}
        for facts, cost in self.workers.call("score", use):
            told |= {of.number: of for of in facts}
            metrics.merge(cost)
        return [told[number].group(self._prompts[number]) for number in numbers], metrics

    def start_rows(self, groups: Sequence[Group]) -> list[Ref]:
        """References to the rows of `groups`, a list from each worker."""
        kept: list[list[tuple[int, int, int]]] = [[] for _ in range(self.workers.size)]
        first = 0
        for place, group in enumerate(groups):
            kept[self._homes[group.number]].append((group.number, place, first))
            first += len(group.trajectories)
        return self.workers.start_each("rows", [(of,) for of in kept]).refs

    def whole(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups with all that was said in them, for reports; this brings their tokens here."""
        asked: list[list[int]] = [[] for _ in range(self.workers.size)]
        for group in groups:
            asked[self._homes[group.number]].append(group.number)
        found = {g.number: g for of in self.workers.scatter("whole", [(a,) for a in asked]) for g in of}
        return [found[group.number] for group in groups]

    def forget(self) -> None:
        """Let go of everything that was collected."""
        self._homes, self._prompts = {}, {}
        self.workers.call("forget")

    def publish(self, version: int) -> None:
        """Sample from the policy's weights as they are now, as `version`."""
        if self.publication is None:
            self.workers.call("publish", version)
        else:
            self.publication.send(version)

    def sleep(self) -> None:
        """Have the engines that share their devices give back what they can of them until `wake`."""
        self._call_in_turns("sleep")

    def wake(self) -> None:
        """Have all engines ready to sample, and to score."""
        self._call_in_turns("wake")

    def _call_in_turns(self, method: str) -> None:
        pending = [self.workers.start_on(rank, method) for rank in self.in_turns]
        for call in pending:
            call.wait()

    @property
    def cache_bytes(self) -> int:
        """Memory of all engines' key/value caches."""
        return sum(self.workers.call("cache_bytes"))

    def close(self) -> None:
        """End the workers."""
        self.workers.close()


def least_load(loads: Sequence[int], num_workers: int) -> list[list[int]]:
    """Places in `loads` of each worker: one after the other to the worker that has least, the first of equals."""
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    totals = [0] * num_workers
    for i, load in enumerate(loads):
        worker = totals.index(min(totals))
        shares[worker].append(i)
        totals[worker] += load + 1
    return shares
