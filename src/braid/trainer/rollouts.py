"""The driver's view of the rollout workers: it distributes prompts and receives metadata; tokens stay on the
workers.

The same code serves one process and many. A prompt's random numbers depend only on its key, so results do not
depend on which worker samples it, nor on what else runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from braid.checks import Sums, add_sums
from braid.cluster.workers import Pending, Ref, WorkerGroup, wait_for_all
from braid.report.metrics import Metrics
from braid.rollout.collector import Collector, GroupMetadata, Use
from braid.rollout.engine import NewWeights
from braid.rollout.engines.hosted import EngineHost
from braid.training.worker import Rank
from braid.types import Group, Key, Prompt
from braid.weights.sending import SendOptions


@dataclass(slots=True)
class _Stream:
    """The groups of one use. `homes` has the rank of the worker of each group; `running` has the prompt of
    each that is not finished yet."""

    homes: dict[Key, int] = field(default_factory=dict)
    running: dict[Key, int] = field(default_factory=dict)
    asked: dict[int, Pending[tuple[list[GroupMetadata], Metrics]]] = field(default_factory=dict)
    """Calls of `finished` that have not been answered, by rank."""


@dataclass(slots=True)
class Rollouts:
    """Workers that run a Collector each. The `policy` in other processes sends its weights to them with the
    options `sending`, adapters merged into them if `merged`; None if they see the weights themselves."""

    workers: WorkerGroup[Collector]
    prompts: Mapping[Use, Sequence[Prompt]]
    in_turns: Sequence[int] = ()
    """Ranks of the workers whose devices are also used for training."""
    policy: WorkerGroup[Rank] | None = None
    sending: SendOptions | None = None
    merged: bool = False
    judges: WorkerGroup[EngineHost] | None = None
    """Workers of the role reward, if there are any."""
    judges_in_turns: Sequence[int] = ()
    """Ranks of those whose devices are also used for training."""
    _ticket: Mapping[str, Any] | None = None
    """That of the sender, once it is open."""
    _streams: dict[Use, _Stream] = field(default_factory=lambda: {"train": _Stream(), "eval": _Stream()})
    _loads: Counter[int] = field(default_factory=Counter)
    """Number of tokens in the prompts of each worker's running groups, plus one for each."""

    def submit(self, use: Use, prompts: Sequence[int], group_size: int, keys: Sequence[Key]) -> None:
        """Start to sample a group for each of `prompts` (indices into the data of `use`), and return. The
        random numbers of each depend only on its key, which identifies the group. In order, each group goes
        to the least loaded worker; ties go to the first."""
        stream = self._streams[use]
        ranks = range(self.workers.size)
        shares: list[list[int]] = [[] for _ in ranks]
        for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
            assert key not in stream.homes, f"there is a group {key} already"
            rank = min(ranks, key=self._loads.__getitem__)
            shares[rank].append(i)
            self._loads[rank] += self._load(use, prompt)
            stream.homes[key] = rank
            stream.running[key] = prompt
        self.workers.scatter(
            Collector.submit,
            [(use, [prompts[i] for i in s], group_size, [keys[i] for i in s]) for s in shares],
        )

    def finished(self, use: Use, within_s: float | None = None) -> tuple[list[Group], Metrics]:
        """Wait until groups are sampled and scored that have not been returned yet, unless none runs, or
        until `within_s` seconds have passed. Returns them without tokens and texts, and the metrics of
        scoring."""
        stream, metrics, groups = self._streams[use], Metrics(), list[Group]()
        while stream.running and not groups:
            for rank in {stream.homes[key] for key in stream.running}:
                if rank not in stream.asked:
                    stream.asked[rank] = self.workers.start_beside(rank, Collector.finished, use)
            answered = self.workers.wait_any(list(stream.asked.values()), within_s)
            for rank in [rank for rank, call in stream.asked.items() if call in answered]:
                ((finished, cost),) = stream.asked.pop(rank).wait()
                metrics.merge(cost)
                # A group may have been cancelled in the meantime.
                kept = [metadata for metadata in finished if metadata.key in stream.running]
                groups += [
                    metadata.group(self.prompts[use][self._end(use, metadata.key)]) for metadata in kept
                ]
            if within_s is not None:
                break
        return groups, metrics

    def gather(self, use: Use, keys: Sequence[Key]) -> tuple[list[Group], Metrics]:
        """Wait for all groups that were submitted. Returns them in the order of their `keys`, as `finished`
        does. No others of this use may run."""
        metrics, groups = Metrics(), dict[Key, Group]()
        while len(groups) < len(keys):
            more, cost = self.finished(use)
            metrics.merge(cost)
            groups |= {group.key: group for group in more}
        return [groups[key] for key in keys], metrics

    def cancel(self, use: Use, keys: Sequence[Key]) -> None:
        """Cancel and drop groups; returns when their environments are closed."""
        stream = self._streams[use]
        for key in keys:
            if key in stream.running:
                self._end(use, key)
        self._drop(Collector.cancel, use, keys)

    def running(self, use: Use) -> list[Key]:
        """The groups that have not been returned by `finished`."""
        return list(self._streams[use].running)

    def start_rows(self, groups: Sequence[Group]) -> list[Ref]:
        """Start to build the rows of `groups`, of the use train. Returns a reference to the list of rows of
        each worker."""
        kept: list[list[tuple[Key, int, int]]] = [[] for _ in range(self.workers.size)]
        first = 0
        for place, group in enumerate(groups):
            kept[self._streams["train"].homes[group.key]].append((group.key, place, first))
            first += len(group.trajectories)
        return self.workers.start_each(Collector.rows, [(rows_of_worker,) for rows_of_worker in kept]).refs

    def check_sums(self, groups: Sequence[Group], *, rescores: bool) -> Sums:
        """Sums for the checks of the loop, over the rows of `groups`; see Collector.check_sums. Scores of
        trajectories are compared if they `rescores`."""
        sums: Sums = {}
        asked = self._by_worker("train", list(dict.fromkeys(group.key for group in groups)))
        for part in self.workers.scatter(
            Collector.check_sums, [(keys if rescores else [],) for keys in asked]
        ):
            add_sums(sums, part)
        return sums

    def whole(self, use: Use, groups: Sequence[Group]) -> list[Group]:
        """The same groups with tokens and texts, for reports; copies them into this process."""
        asked = self._by_worker(use, [group.key for group in groups])
        answers = self.workers.scatter(Collector.whole, [(use, keys) for keys in asked])
        by_key = {group.key: group for answer in answers for group in answer}
        return [by_key[group.key] for group in groups]

    def forget(self, use: Use, keys: Sequence[Key] | None = None) -> None:
        """Drop finished groups; all of them without `keys`."""
        stream = self._streams[use]
        if keys is None:
            keys = [key for key in stream.homes if key not in stream.running]
        self._drop(Collector.forget, use, keys)

    def set_weights(self, version: int, when: NewWeights = "drain") -> None:
        """Sample with the policy's current weights from now on, as `version`; see Engine.set_weights."""
        if self.policy is None:
            self.workers.every(Collector).set_weights(version, when)
            return
        if self._ticket is None:
            assert self.sending is not None, "a policy in other processes has options"
            names = [name for part in self.workers.call(Collector.receivers) for name in part]
            self._ticket = self.policy.call(Rank.open_sender, names, self.sending)[0]
        received = self.workers.start(Collector.set_weights, version, when, self._ticket)
        sent = self.policy.start(Rank.send_weights, version, self.merged)
        wait_for_all([(self.policy, sent), (self.workers, received)])

    def _load(self, use: Use, prompt: int) -> int:
        return len(self.prompts[use][prompt].token_ids) + 1

    def _end(self, use: Use, key: Key) -> int:
        """Note that a group is no longer running; returns the index of its prompt."""
        stream = self._streams[use]
        prompt = stream.running.pop(key)
        self._loads[stream.homes[key]] -= self._load(use, prompt)
        return prompt

    def _by_worker(self, use: Use, keys: Sequence[Key]) -> list[list[Key]]:
        shares: list[list[Key]] = [[] for _ in range(self.workers.size)]
        for key in keys:
            shares[self._streams[use].homes[key]].append(key)
        return shares

    def _drop(
        self, method: Callable[[Collector, Use, Sequence[Key]], None], use: Use, keys: Sequence[Key]
    ) -> None:
        self.workers.scatter(method, [(use, worker_keys) for worker_keys in self._by_worker(use, keys)])
        for key in keys:
            del self._streams[use].homes[key]

    def sleep(self) -> None:
        """Have the engines that share devices with training free the memory that they do not need until
        `wake`."""
        self._call_in_turns(Collector.sleep, EngineHost.sleep)

    def wake(self) -> None:
        """Prepare all engines for sampling and scoring."""
        self._call_in_turns(Collector.wake, EngineHost.wake)

    def _call_in_turns(
        self, method: Callable[[Collector], None], of_judges: Callable[[EngineHost], None]
    ) -> None:
        pending = [self.workers.start_on(rank, method) for rank in self.in_turns]
        if self.judges is not None:
            pending += [self.judges.start_on(rank, of_judges) for rank in self.judges_in_turns]
        for call in pending:
            call.wait()

    @property
    def cache_bytes(self) -> int:
        """Bytes of all engines' key/value caches."""
        return sum(self.workers.call(Collector.cache_bytes))

    def close(self) -> None:
        """Stop the workers."""
        self.workers.close()
        if self.judges is not None:
            self.judges.close()
