"""The driver's view of the rollout workers: it distributes prompts and receives metadata; tokens stay on the
workers.

The same code serves one process and many. A prompt's random numbers depend only on its key and number, so
results do not depend on which worker samples it, nor on what else runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from braid.report.metrics import Metrics
from braid.rollout.collector import Use
from braid.rollout.engine import NewWeights
from braid.runtime.workers import Pending, Ref, WorkerGroup
from braid.types import Group, Prompt


class Publisher(Protocol):
    """Syncs the policy's weights to engines in other processes."""

    def send(self, version: int, when: NewWeights) -> None:
        """See Rollouts.set_weights."""
        ...


class Submitted(NamedTuple):
    """A group that was asked for: arguments of `submit`."""

    place: int
    group_size: int
    key: tuple[int, ...]
    number: int


@dataclass(slots=True)
class _Stream:
    """The groups of one use. `homes` has the rank of the worker of each group, `running` those not finished yet."""

    homes: dict[int, int] = field(default_factory=dict)
    running: dict[int, Submitted] = field(default_factory=dict)
    asked: dict[int, Pending] = field(default_factory=dict)
    """Calls of `finished` that have not been answered, by rank."""


@dataclass(slots=True)
class Rollouts:
    """Workers that run a Collector each. `publication` syncs weights to them; None if they see the policy's
    weights themselves."""

    workers: WorkerGroup
    prompts: Mapping[Use, Sequence[Prompt]]
    publication: Publisher | None = None
    in_turns: Sequence[int] = ()
    """Ranks of the workers whose devices are also used for training."""
    _streams: dict[Use, _Stream] = field(default_factory=lambda: {"train": _Stream(), "eval": _Stream()})
    _loads: Counter[int] = field(default_factory=Counter)
    """Number of tokens in the prompts of each worker's running groups, plus one for each."""

    def submit(
        self,
        use: Use,
        places: Sequence[int],
        group_size: int,
        *,
        key: tuple[int, ...],
        numbers: Sequence[int],
    ) -> None:
        """Start to sample a group for each of the prompts at indices `places`, and return. The random numbers of
        each depend only on `key` and its number, which identifies the group. In order, each group goes to the
        least loaded worker; ties go to the first."""
        stream = self._streams[use]
        ranks = range(self.workers.size)
        shares: list[list[int]] = [[] for _ in ranks]
        for i, (place, number) in enumerate(zip(places, numbers, strict=True)):
            assert number not in stream.homes, f"there is a group {number} already"
            rank = min(ranks, key=self._loads.__getitem__)
            shares[rank].append(i)
            self._loads[rank] += self._load(use, place)
            stream.homes[number] = rank
            stream.running[number] = Submitted(place, group_size, key, number)
        self.workers.scatter(
            "submit",
            [(use, [places[i] for i in s], group_size, key, [numbers[i] for i in s]) for s in shares],
        )

    def finished(self, use: Use) -> tuple[list[Group], Metrics]:
        """Wait until groups are sampled and scored that have not been returned yet, unless none runs. Returns
        them without tokens and texts, and the metrics of scoring."""
        stream, metrics, groups = self._streams[use], Metrics(), list[Group]()
        while stream.running and not groups:
            for rank in {stream.homes[number] for number in stream.running}:
                if rank not in stream.asked:
                    stream.asked[rank] = self.workers.start_on(rank, "finished", use, is_beside=True)
            answered = self.workers.wait_any(list(stream.asked.values()))
            for rank in [rank for rank, call in stream.asked.items() if call in answered]:
                ((told, cost),) = stream.asked.pop(rank).wait()
                metrics.merge(cost)
                for facts in told:
                    of = self._end(use, facts.number)
                    groups.append(facts.group(self.prompts[use][of.place]))
        return groups, metrics

    def collect(
        self,
        use: Use,
        places: Sequence[int],
        group_size: int,
        *,
        key: tuple[int, ...],
        numbers: Sequence[int],
    ) -> tuple[list[Group], Metrics]:
        """Submit groups and wait for all of them. Returns them in the order of `numbers`, as `finished` does. No
        others of this use may run."""
        metrics, groups = Metrics(), dict[int, Group]()
        self.submit(use, places, group_size, key=key, numbers=numbers)
        while len(groups) < len(numbers):
            more, cost = self.finished(use)
            metrics.merge(cost)
            groups |= {group.number: group for group in more}
        return [groups[number] for number in numbers], metrics

    def cancel(self, use: Use, numbers: Sequence[int]) -> None:
        """Cancel and drop groups; returns when their environments are closed."""
        stream = self._streams[use]
        for number in numbers:
            if number in stream.running:
                self._end(use, number)
        self._drop("cancel", use, numbers)

    def state(self, use: Use) -> list[Submitted]:
        """The groups that have not been returned by `finished`. Submitting them again gives the same groups, with
        the same weights."""
        return list(self._streams[use].running.values())

    def start_rows(self, groups: Sequence[Group]) -> list[Ref]:
        """Start to build the rows of `groups`, of the use train. Returns a reference to the list of rows of each
        worker."""
        kept: list[list[tuple[int, int, int]]] = [[] for _ in range(self.workers.size)]
        first = 0
        for place, group in enumerate(groups):
            kept[self._streams["train"].homes[group.number]].append((group.number, place, first))
            first += len(group.trajectories)
        return self.workers.start_each("rows", [(of,) for of in kept]).refs

    def whole(self, use: Use, groups: Sequence[Group]) -> list[Group]:
        """The same groups with tokens and texts, for reports; copies them into this process."""
        asked = self._by_worker(use, [group.number for group in groups])
        found = {g.number: g for of in self.workers.scatter("whole", [(use, a) for a in asked]) for g in of}
        return [found[group.number] for group in groups]

    def forget(self, use: Use) -> None:
        """Drop all finished groups."""
        stream = self._streams[use]
        self._drop("forget", use, [number for number in stream.homes if number not in stream.running])

    def set_weights(self, version: int, when: NewWeights = "drain") -> None:
        """Sample with the policy's current weights from now on, as `version`; see Engine.set_weights."""
        if self.publication is None:
            self.workers.call("set_weights", version, when)
        else:
            self.publication.send(version, when)

    def _load(self, use: Use, place: int) -> int:
        return len(self.prompts[use][place].token_ids) + 1

    def _end(self, use: Use, number: int) -> Submitted:
        """Note that a group is no longer running."""
        stream = self._streams[use]
        of = stream.running.pop(number)
        self._loads[stream.homes[number]] -= self._load(use, of.place)
        return of

    def _by_worker(self, use: Use, numbers: Sequence[int]) -> list[list[int]]:
        shares: list[list[int]] = [[] for _ in range(self.workers.size)]
        for number in numbers:
            shares[self._streams[use].homes[number]].append(number)
        return shares

    def _drop(self, method: str, use: Use, numbers: Sequence[int]) -> None:
        self.workers.scatter(method, [(use, of) for of in self._by_worker(use, numbers)])
        for number in numbers:
            del self._streams[use].homes[number]

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
