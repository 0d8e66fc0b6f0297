"""The driver's view of the rollout workers: it distributes prompts and receives metadata; tokens stay on the
workers.

The same code serves one process and many. A prompt's random numbers depend only on its number
(rollout.drivers), so results do not depend on which worker samples it.
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
    """Syncs the policy's weights to engines."""

    def send(self, version: int) -> None:
        """Sync the policy's current weights to all engines, as `version`."""
        ...


@dataclass(slots=True)
class Rollouts:
    """Workers that run a Collector each. `publication` syncs weights to them; None if the engine shares the
    policy's tensors."""

    workers: WorkerGroup
    prompts: Mapping[Use, Sequence[Prompt]]
    publication: Publisher | None = None
    in_turns: Sequence[int] = ()
    """Ranks of the workers whose devices are also used for training."""
    _homes: dict[int, int] = field(default_factory=dict)
    """Rank of the worker that holds each group, by the group's number."""
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
        """Sample a group for each of the prompts at indices `places`; `key` and `numbers`
        give each its random numbers."""
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
        """Score the groups sampled since the last call. Returns the groups of `numbers`, in that order,
        without tokens and texts, and the metrics of scoring."""
        metrics = Metrics()
        told: dict[int, GroupFacts] = {}
        for facts, cost in self.workers.call("score", use):
            told |= {of.number: of for of in facts}
            metrics.merge(cost)
        return [told[number].group(self._prompts[number]) for number in numbers], metrics

    def start_rows(self, groups: Sequence[Group]) -> list[Ref]:
        """Start to build the rows of `groups`. Returns a reference to the list of rows of each worker."""
        kept: list[list[tuple[int, int, int]]] = [[] for _ in range(self.workers.size)]
        first = 0
        for place, group in enumerate(groups):
            kept[self._homes[group.number]].append((group.number, place, first))
            first += len(group.trajectories)
        return self.workers.start_each("rows", [(of,) for of in kept]).refs

    def whole(self, groups: Sequence[Group]) -> list[Group]:
        """The same groups with tokens and texts, for reports; copies them into this process."""
        asked: list[list[int]] = [[] for _ in range(self.workers.size)]
        for group in groups:
            asked[self._homes[group.number]].append(group.number)
        found = {g.number: g for of in self.workers.scatter("whole", [(a,) for a in asked]) for g in of}
        return [found[group.number] for group in groups]

    def forget(self) -> None:
        """Drop all groups."""
        self._homes, self._prompts = {}, {}
        self.workers.call("forget")

    def publish(self, version: int) -> None:
        """Sync the policy's current weights to the engines, as `version`."""
        if self.publication is None:
            self.workers.call("set_weights", version)
        else:
            self.publication.send(version)

    def sleep(self) -> None:
        """Have the engines that share devices with training free the memory that they do not need until
        `wake`."""
        self._call_in_turns("sleep")

    def wake(self) -> None:
        """Prepare all engines for sampling and scoring."""
        self._call_in_turns("wake")

    def _call_in_turns(self, method: str) -> None:
        pending = [self.workers.start_on(rank, method) for rank in self.in_turns]
        for call in pending:
            call.wait()

    @property
    def cache_bytes(self) -> int:
        """Bytes of all engines' key/value caches."""
        return sum(self.workers.call("cache_bytes"))

    def close(self) -> None:
        """Stop the workers."""
        self.workers.close()


def least_load(loads: Sequence[int], num_workers: int) -> list[list[int]]:
    """Distribute loads over workers; returns the indices into `loads` of each. In order, each load goes to
    the least loaded worker; ties go to the first."""
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    totals = [0] * num_workers
    for i, load in enumerate(loads):
        worker = totals.index(min(totals))
        shares[worker].append(i)
        totals[worker] += load + 1
    return shares
