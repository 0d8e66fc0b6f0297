"""The driver's view of the rollout buffer: it assigns rows to ranks by their metadata, and forwards only
references.

The driver's cost grows with the number of rows, not with their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from braid.cluster.workers import Joined, Pending, Ref, WorkerGroup, proxy
from braid.models.base import Output
from braid.training.backend import Loss, TrainingBackend
from braid.training.group import ModelGroup
from braid.training.rollout_buffer import RolloutBuffer
from braid.types import Row, RowMetadata


class Buffer:
    """The rows of a round, in one or several processes."""

    def __init__(self, shards: WorkerGroup[RolloutBuffer]) -> None:
        self.shards = shards
        self.whole: RolloutBuffer = proxy(RolloutBuffer, self._over_all)
        """The rows of all processes, in the first, for what depends on all rows."""

    @property
    def every(self) -> RolloutBuffer:
        """The part of each process, for what is done row by row."""
        return self.shards.every(RolloutBuffer)

    def open(self, pieces: Sequence[Ref]) -> list[RowMetadata]:
        """Store the rows of a round; each reference is to the list of rows of a rollout worker. Returns their
        metadata."""
        size = self.shards.size
        parts = self.shards.scatter(RolloutBuffer.open, [(list(pieces[n::size]),) for n in range(size)])
        return sorted((row for part in parts for row in part), key=lambda row: row.trajectory)

    def start_infer(
        self, model: ModelGroup, rows: Sequence[RowMetadata], fields: Mapping[Output, str]
    ) -> list[Pending[None]]:
        """Start to compute the model's outputs for the rows and write each to its one of their `fields`, as
        RolloutBuffer.merge does. Other models can run at the same time."""
        shares, spare = self._shares(model, rows, is_bare=True)
        arguments = [(taken, frozenset(fields), spare) for taken, _ in model.by_rank(shares)]
        results = model.by_share(model.ranks.start_each(TrainingBackend.infer, arguments).refs)
        places: list[list[tuple[int, int, int]]] = [[] for _ in range(self.shards.size)]
        for number, (_, share) in enumerate(shares):
            for place, i in enumerate(share):
                places[rows[i].shard].append((rows[i].index, number, place))
        return [
            self.shards.start_on(shard, RolloutBuffer.merge, fields, targets, results)
            for shard, targets in enumerate(places)
            if targets
        ]

    def for_ranks(
        self, model: ModelGroup, rows: Sequence[RowMetadata], weights: Sequence[float], loss: Loss
    ) -> list[tuple[Any, ...]]:
        """The arguments of TrainingBackend.train on each rank, for one optimizer step on `rows`."""
        shares, spare = self._shares(model, rows, is_bare=False)
        return [(taken, [weights[i] for i in share], loss, spare) for taken, share in model.by_rank(shares)]

    def copies(self, rows: Sequence[RowMetadata]) -> list[Row]:
        """The rows with all arrays, for reports; copies them into this process."""
        copied: dict[tuple[int, int], Row] = {}
        for shard, indices in enumerate(self._by_shard(rows)):
            (taken,) = self.shards.start_on(shard, RolloutBuffer.take, indices, False).wait()
            copied |= zip(((shard, index) for index in indices), taken, strict=True)
        return [copied[row.shard, row.index] for row in rows]

    def _shares(
        self, model: ModelGroup, rows: Sequence[RowMetadata], *, is_bare: bool
    ) -> tuple[list[tuple[Ref, list[int]]], Ref]:
        """A reference to the rows of each share with their indices into `rows`, in order, and one to a row
        for ranks without any, which take part in a pass without contributing."""

        def taken(shard: int, indices: list[int]) -> Ref:
            return self.shards.start_on(shard, RolloutBuffer.take, indices, is_bare).refs[0]

        shares: list[tuple[Ref, list[int]]] = []
        for share in model.shares(rows):
            share.sort(key=lambda i: rows[i].shard)
            by_shard = self._by_shard([rows[i] for i in share])
            refs = [taken(shard, indices) for shard, indices in enumerate(by_shard) if indices]
            shares.append((refs[0] if len(refs) == 1 else Joined(refs), share))
        return shares, self.shards.start_on(rows[0].shard, RolloutBuffer.first, is_bare).refs[0]

    def _by_shard(self, rows: Sequence[RowMetadata]) -> list[list[int]]:
        indices: list[list[int]] = [[] for _ in range(self.shards.size)]
        for row in rows:
            indices[row.shard].append(row.index)
        return indices

    def _over_all(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the method in the first process with the rows of all."""
        others, method = range(1, self.shards.size), getattr(RolloutBuffer, name)
        if not others:
            return self.shards.call(method, *args, **kwargs)[0]
        lent = [self.shards.start_on(shard, RolloutBuffer.lend).refs[0] for shard in others]
        pending: list[Pending[Any]] = [self.shards.start_on(0, RolloutBuffer.borrow, lent)]
        called = self.shards.start_on(0, method, *args, **kwargs)
        for shard in others:
            fields = self.shards.start_on(0, RolloutBuffer.give_back, shard - 1).refs[0]
            pending.append(self.shards.start_on(shard, RolloutBuffer.take_back, fields))
        (value,) = called.wait()
        for call in pending:
            call.wait()
        return value
