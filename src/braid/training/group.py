"""A training backend spread over worker processes, seen from the controller as one backend.

    rows ─share─> rank 0: its rows ─┐
                  rank 1: its rows ─┴─ one optimizer step together ─> one report

Each rank holds a shard of the model and runs the rows it is given; denominators are counted over the whole step before
(algorithms.aggregate), so that how rows are shared out changes no number beyond rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from braid.models.base import Output
from braid.models.flops import Flops
from braid.runtime.workers import Pending, Ref, WorkerGroup
from braid.types import Row

from .backend import HeldBytes, Loss, StepReport, Work, Written


class Sized(Protocol):
    """What sharing out asks of a row, or of what stands for it."""

    @property
    def group(self) -> int: ...
    def __len__(self) -> int: ...


class ShardedBackend(Protocol):
    """What a rank runs: a TrainingBackend whose calls all ranks make together.

    `data_place()` is (index, number) of the share of the rows that the rank is given: ranks that work on the same rows (of
    one tensor, pipeline, context or sequence parallel group) have the same. Each of them returns the results.

    `spare` stands in where a rank has fewer micro-batches than another: its forward and backward count for nothing.
    """

    def data_place(self) -> tuple[int, int]: ...

    def infer(
        self, rows: Sequence[Row], outputs: frozenset[Output], spare: Row
    ) -> list[dict[str, NDArray[np.float32]]]: ...

    def train(self, rows: Sequence[Row], weights: Sequence[float], loss: Loss, spare: Row) -> StepReport: ...

    def full_weights(self, merged: bool = False) -> dict[str, Tensor]:
        """Checkpoint name -> whole tensor in host memory, on rank 0; empty on the others. `merged` as in iter_weights."""
        ...

    def iter_weights(self, *, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and whole tensors where they are, gathered part by part so that no rank holds them all: for
        weights.sender.join_send. All ranks read to the end; only what rank 0 is given stays valid, and counts. With `merged`
        those of the model without adapters, which are added to the weights that they belong to."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over whole tensors by their checkpoint names."""
        ...

    def state(self) -> dict[str, Any]:
        """As SingleBackend.state: whole tensors on rank 0; the others return what is small."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; every rank is given the whole."""
        ...

    def save(self, folder: str) -> Written:
        """Write this rank's part of the state into `folder` (training.shards); in one process it may come back instead."""
        ...

    def restore(self, saved: dict[str, Any], folder: str) -> None:
        """Take over what ranks of any layout have saved: what came back of rank 0, and the folder. Raises CheckpointError
        when it is of another model."""
        ...

    def to_host(self) -> None: ...

    def to_device(self) -> None: ...

    def take_work(self) -> Work: ...

    def held_bytes(self) -> HeldBytes: ...

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops: ...


@dataclass(slots=True)
class GroupBackend:
    """A model and its optimizer as the controller sees them. `start_infer` and `start_train` take references to rows, a share each, so that rows need not be in
    this process."""

    group: WorkerGroup
    balances: bool = True
    _places: list[tuple[int, int]] = field(init=False)
    """(share, number of shares) of each rank."""

    def __post_init__(self) -> None:
        self._places = self.group.call("data_place")

    def shares(self, rows: Sequence[Sized]) -> list[list[int]]:
        """Places in `rows` of each share."""
        return share_rows(rows, self._places[0][1], balances=self.balances)

    def start_infer(self, shares: Sequence[Ref], outputs: frozenset[Output], spare: Ref) -> list[Ref]:
        """Forward only, of the rows of each share; the results of each. `spare` is one row."""
        arguments = [(shares[index], outputs, spare) for index, _ in self._places]
        refs = self.group.start_each("infer", arguments).refs
        return [refs[self._ranks[index]] for index in range(len(shares))]

    def start_train(
        self, shares: Sequence[Ref], weights: Sequence[Sequence[float]], loss: Loss, spare: Ref
    ) -> Pending:
        """One optimizer step over the rows of all shares; each rank's report is that of the step."""
        arguments = [(shares[index], weights[index], loss, spare) for index, _ in self._places]
        return self.group.start_each("train", arguments)

    @property
    def _ranks(self) -> dict[int, int]:
        """The first rank that has each share."""
        return {index: rank for rank, (index, _) in reversed(list(enumerate(self._places)))}

    def infer(self, rows: Sequence[Row], outputs: frozenset[Output]) -> list[dict[str, NDArray[np.float32]]]:
        """See TrainingBackend."""
        shares = self.shares(rows)
        parts = [[bare(rows[i]) for i in share] for share in shares]
        arguments = [(parts[index], outputs, bare(rows[0])) for index, _ in self._places]
        by_rank = self.group.scatter("infer", arguments)
        results: list[dict[str, NDArray[np.float32]]] = [{} for _ in rows]
        for index, share in enumerate(shares):
            for place, result in zip(share, by_rank[self._ranks[index]], strict=True):
                results[place] = result
        return results

    def train(self, rows: Sequence[Row], weights: Sequence[float], loss: Loss) -> StepReport:
        """See TrainingBackend."""
        shares = self.shares(rows)
        parts = [[rows[i] for i in share] for share in shares]
        return self.start_train(
            parts, [[weights[i] for i in share] for share in shares], loss, rows[0]
        ).wait()[0]

    def full_weights(self) -> dict[str, Tensor]:
        """Checkpoint name -> whole tensor. In one process they are the trained ones themselves."""
        return self.group.call("full_weights")[0]

    def start_full_weights(self, *, merged: bool = False) -> Ref:
        """A reference to `full_weights`, for who needs them in another process; `merged` as in ShardedBackend.iter_weights."""
        return self.group.start("full_weights", merged).refs[0]

    def load_weights(self, weights: Mapping[str, Tensor] | Ref) -> None:
        """Take over whole tensors by their checkpoint names, or those that a reference stands for."""
        self.group.call("load_weights", weights)

    def to_host(self) -> None:
        """See TrainingBackend."""
        self.group.call("to_host")

    def to_device(self) -> None:
        """See TrainingBackend."""
        self.group.call("to_device")

    def close(self) -> None:
        """See TrainingBackend."""
        self.group.close()

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        """See TrainingBackend."""
        return self.group.call("flops", lengths, num_outputs)[0]

    def take_work(self) -> Work:
        """See TrainingBackend. Operations of all ranks, in the seconds of the slowest."""
        parts: list[Work] = self.group.call("take_work")
        return Work(
            infer_flops=sum(p.infer_flops for p in parts),
            infer_s=max(p.infer_s for p in parts),
            train_flops=sum(p.train_flops for p in parts),
            train_s=max(p.train_s for p in parts),
        )

    def held_bytes(self) -> HeldBytes:
        """See TrainingBackend. Of all ranks together."""
        parts: list[HeldBytes] = self.group.call("held_bytes")
        return HeldBytes(
            weights=sum(p.weights for p in parts),
            gradients=sum(p.gradients for p in parts),
            optimizer=sum(p.optimizer for p in parts),
            is_on_device=all(p.is_on_device for p in parts),
        )

    def state(self) -> dict[str, Any]:
        """See TrainingBackend. In the form that one process has, so that any layout can go on from it."""
        return self.group.call("state")[0]

    def load(self, state: dict[str, Any]) -> None:
        """See TrainingBackend."""
        self.group.call("load", state)

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Have the ranks write the state into `folder`, each its part at the same time; what of it they have not written, and
        the files' lines of a checkpoint's manifest. Raises OSError."""
        written: list[Written] = self.group.call("save", str(folder.absolute()))
        for part in written:
            if part.error is not None:
                raise part.error
        return written[0].state, {name: line for part in written for name, line in part.files.items()}

    def restore(self, saved: dict[str, Any], folder: Path) -> None:
        """Take over what `save` of any layout gave and wrote. Raises CheckpointError when it is of another model."""
        self.group.call("restore", saved, str(folder.absolute()))


def share_rows(rows: Sequence[Sized], num_ranks: int, *, balances: bool) -> list[list[int]]:
    """Indices of the rows of each share. Rows of a prompt stay together where that leaves ranks about even, since they
    store it once; with `balances` ranks get about as many tokens, else as many rows, in order."""
    if not balances:
        bounds = np.linspace(0, len(rows), num_ranks + 1).round().astype(int).tolist()
        return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    total = sum(len(row) for row in rows)
    units: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        units.setdefault(row.group, []).append(index)
    size_of = _size_of(rows)
    pieces = [piece for unit in units.values() for piece in (_halved(unit, size_of, total / num_ranks / 4))]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for piece in sorted(pieces, key=lambda p: (-size_of(p), p[0])):
        rank = loads.index(min(loads))
        shares[rank].extend(piece)
        loads[rank] += size_of(piece)
    return [sorted(share) for share in shares]


def _size_of(rows: Sequence[Sized]) -> Callable[[Sequence[int]], int]:
    return lambda piece: sum(len(rows[i]) for i in piece)


def _halved(unit: list[int], size_of: Callable[[Sequence[int]], int], most: float) -> list[list[int]]:
    """The unit in pieces of at most `most` tokens, or of one row."""
    if len(unit) == 1 or size_of(unit) <= most:
        return [unit]
    middle = len(unit) // 2
    return _halved(unit[:middle], size_of, most) + _halved(unit[middle:], size_of, most)


def bare(row: Row) -> Row:
    """The row without its fields, which a forward pass does not read."""
    return Row(row.inputs, row.mask, row.group, row.trajectory, is_terminal=row.is_terminal)
