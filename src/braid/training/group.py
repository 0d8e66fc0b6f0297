"""A model on its ranks, as the driver uses it, and how rows are shared between ranks.

    rows ─shares─> rank 0: its rows ─┐
                   rank 1: its rows ─┴─ one optimizer step together ─> one report

Each rank holds a shard of the model and runs its share of the rows; denominators are computed over the whole
step beforehand (algorithms.aggregate), so the distribution of rows changes results only by rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from braid.cluster.workers import WorkerGroup
from braid.models.base import Output
from braid.types import Row

from .backend import HeldBytes, Loss, StepReport, TrainingBackend, Work
from .packing import trajectories_of

T = TypeVar("T")


class Sized(Protocol):
    """What the distribution needs to know of a row, or of its metadata."""

    @property
    def group(self) -> int: ...
    @property
    def trajectory(self) -> int: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """A role's model on its ranks. `places` are the ranks' TrainingBackend.data_place."""

    ranks: WorkerGroup[TrainingBackend]
    places: Sequence[tuple[int, int]]
    balances: bool = True

    @classmethod
    def of(cls, ranks: WorkerGroup[TrainingBackend], *, balances: bool = True) -> ModelGroup:
        return cls(ranks, ranks.call(TrainingBackend.data_place), balances)

    def shares(self, rows: Sequence[Sized]) -> list[list[int]]:
        """Indices into `rows` of each share."""
        return share_rows(rows, self.places[0][1], balances=self.balances)

    def by_rank(self, shares: Sequence[T]) -> list[T]:
        """Each rank's of the items of all shares."""
        return [shares[index] for index, _ in self.places]

    def by_share(self, ranks: Sequence[T]) -> list[T]:
        """Each share's of the results of all ranks."""
        first = {index: rank for rank, (index, _) in reversed(list(enumerate(self.places)))}
        return [ranks[first[index]] for index in range(len(first))]

    def train(self, rows: Sequence[Row], weights: Sequence[float], loss: Loss) -> StepReport:
        """Take an optimizer step on rows in this process; see TrainingBackend.train."""
        shares = self.shares(rows)
        arguments = [
            ([rows[i] for i in share], [weights[i] for i in share], loss, rows[0])
            for share in self.by_rank(shares)
        ]
        return self.ranks.scatter(TrainingBackend.train, arguments)[0]

    def infer(self, rows: Sequence[Row], outputs: frozenset[Output]) -> list[dict[Output, NDArray[Any]]]:
        """Outputs of rows in this process, in their order; see TrainingBackend.infer."""
        shares = self.shares(rows)
        arguments = [([rows[i] for i in share], outputs, rows[0]) for share in self.by_rank(shares)]
        results = self.by_share(self.ranks.scatter(TrainingBackend.infer, arguments))
        by_row = {
            i: result
            for share, part in zip(shares, results, strict=True)
            for i, result in zip(share, part, strict=True)
        }
        return [by_row[i] for i in range(len(rows))]

    def take_work(self) -> Work:
        """Operations of all ranks since the last call, and the duration of the slowest."""
        parts = self.ranks.call(TrainingBackend.take_work)
        return Work(
            infer_flops=sum(p.infer_flops for p in parts),
            infer_s=max(p.infer_s for p in parts),
            train_flops=sum(p.train_flops for p in parts),
            train_s=max(p.train_s for p in parts),
        )

    def held_bytes(self) -> HeldBytes:
        """Memory of the model on all ranks."""
        parts = self.ranks.call(TrainingBackend.held_bytes)
        return HeldBytes(
            weights=sum(p.weights for p in parts),
            gradients=sum(p.gradients for p in parts),
            optimizer=sum(p.optimizer for p in parts),
            is_on_device=all(p.is_on_device for p in parts),
        )

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Write the state into `folder`, all ranks in parallel. Returns the part of the state that is not in
        files, and the files' entries for the checkpoint's manifest. Raises OSError."""
        written = self.ranks.call(TrainingBackend.save, str(folder.absolute()))
        for part in written:
            if part.error is not None:
                raise part.error
        return written[0].state, {name: line for part in written for name, line in part.files.items()}

    def restore(self, saved: dict[str, Any], folder: Path) -> None:
        """Restore what `save` of any layout returned and wrote. Raises CheckpointError if it belongs to
        another model."""
        self.ranks.call(TrainingBackend.restore, saved, str(folder.absolute()))


def share_rows(rows: Sequence[Sized], num_ranks: int, *, balances: bool) -> list[list[int]]:
    """Indices of the rows of each share. The rows of a trajectory stay together; those with the same prompt
    do if the shares remain about equal, since the prompt is then stored once. With `balances` shares have
    about equally many tokens, else equally many trajectories, in order."""
    trajectories = trajectories_of(rows)
    if not balances:
        bounds = np.linspace(0, len(trajectories), num_ranks + 1).round().astype(int).tolist()
        return [list(itertools.chain(*trajectories[a:b])) for a, b in itertools.pairwise(bounds)]
    total = sum(len(row) for row in rows)
    units: dict[int, list[list[int]]] = {}
    for trajectory in trajectories:
        units.setdefault(rows[trajectory[0]].group, []).append(trajectory)

    def size_of(piece: Iterable[int]) -> int:
        return sum(len(rows[i]) for i in piece)

    pieces = [
        list(itertools.chain(*piece))
        for unit in units.values()
        for piece in _halved(unit, size_of, total / num_ranks / 4)
    ]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for piece in sorted(pieces, key=lambda p: (-size_of(p), p[0])):
        rank = loads.index(min(loads))
        shares[rank].extend(piece)
        loads[rank] += size_of(piece)
    return [sorted(share) for share in shares]


def _halved(
    unit: list[list[int]], size_of: Callable[[Iterable[int]], int], most: float
) -> list[list[list[int]]]:
    """The trajectories of a group in pieces of at most `most` tokens, or of one trajectory."""
    if len(unit) == 1 or size_of(itertools.chain(*unit)) <= most:
        return [unit]
    middle = len(unit) // 2
    return _halved(unit[:middle], size_of, most) + _halved(unit[middle:], size_of, most)
