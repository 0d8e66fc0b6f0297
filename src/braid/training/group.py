"""A training backend distributed over worker processes, which the driver uses like a single one.

    rows ─share─> rank 0: its rows ─┐
                  rank 1: its rows ─┴─ one optimizer step together ─> one report

Each rank holds a shard of the model and runs its share of the rows; denominators are computed over the whole
step beforehand (algorithms.aggregate), so the distribution of rows changes results only by rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from braid.cluster.workers import Pending, Ref, WorkerGroup
from braid.models.base import Output
from braid.models.batch import PackedBatch
from braid.models.flops import Flops
from braid.models.logprobs import TiledLogits
from braid.types import Row

from .backend import HeldBytes, Loss, StepReport, Work, Written
from .packing import trajectories_of


class Sized(Protocol):
    """What the distribution needs to know of a row, or of its metadata."""

    @property
    def group(self) -> int: ...
    @property
    def trajectory(self) -> int: ...
    def __len__(self) -> int: ...


class ShardedBackend(Protocol):
    """The backend of one rank: a TrainingBackend whose calls are collective.

    `data_place()` is (index, number) of the rank's share of the rows; ranks that work on the same rows (of
    one tensor, pipeline, context or sequence parallel group) have the same share, and each returns the
    results.

    A rank with fewer micro-batches than another runs `spare` instead, with zero weight.
    """

    def data_place(self) -> tuple[int, int]: ...

    def infer(
        self, rows: Sequence[Row], outputs: frozenset[Output], spare: Row
    ) -> list[dict[str, NDArray[np.float32]]]: ...

    def train(self, rows: Sequence[Row], weights: Sequence[float], loss: Loss, spare: Row) -> StepReport: ...

    def use_reference(self, logits: Callable[[PackedBatch], TiledLogits]) -> None:
        """Measure the output "kl" of a policy from `logits` of the reference in the same process."""
        ...

    def logits(self, batch: PackedBatch) -> TiledLogits:
        """Logits that predict the policy's tokens, for the output "kl" of another model. They stay valid
        until the weights change."""
        ...

    def full_weights(self, merged: bool = False) -> dict[str, Tensor]:
        """Checkpoint name -> whole tensor in host memory, on rank 0; empty on the others. `merged` as in
        iter_weights."""
        ...

    def iter_weights(self, *, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and whole tensors on their device, gathered in parts so that no rank holds all of
        them: for weights.sender.join_send. All ranks must exhaust the iterator; only rank 0's tensors are
        valid. With `merged` adapters are added to the weights that they belong to."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load whole tensors by their checkpoint names."""
        ...

    def state(self) -> dict[str, Any]:
        """As SingleBackend.state: whole tensors on rank 0; the other ranks return only the small parts."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; every rank gets the whole."""
        ...

    def save(self, folder: str) -> Written:
        """Write this rank's part of the state into `folder` (training.shards); a single process may return it
        instead."""
        ...

    def restore(self, saved: dict[str, Any], folder: str) -> None:
        """Restore what ranks of any layout have saved: the state returned by rank 0, and the folder. Raises
        CheckpointError if it belongs to another model."""
        ...

    def to_host(self) -> None: ...

    def to_device(self) -> None: ...

    def take_work(self) -> Work: ...

    def held_bytes(self) -> HeldBytes: ...

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops: ...


@dataclass(slots=True)
class GroupBackend:
    """A model and its optimizer as the driver sees them. `start_infer` and `start_train` take references
    to rows, one per share, so that the rows need not be in this process."""

    group: WorkerGroup
    balances: bool = True
    _places: list[tuple[int, int]] = field(init=False)
    """(share, number of shares) of each rank."""

    def __post_init__(self) -> None:
        self._places = self.group.call("data_place")

    def shares(self, rows: Sequence[Sized]) -> list[list[int]]:
        """Indices into `rows` of each share."""
        return share_rows(rows, self._places[0][1], balances=self.balances)

    def start_infer(self, shares: Sequence[Ref], outputs: frozenset[Output], spare: Ref) -> list[Ref]:
        """Forward passes over the rows of each share; returns the results per share. `spare` is one row."""
        arguments = [(shares[index], outputs, spare) for index, _ in self._places]
        refs = self.group.start_each("infer", arguments).refs
        return [refs[self._ranks[index]] for index in range(len(shares))]

    def start_train(
        self, shares: Sequence[Ref], weights: Sequence[Sequence[float]], loss: Loss, spare: Ref
    ) -> Pending:
        """One optimizer step over the rows of all shares; every rank reports the whole step."""
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
        """Checkpoint name -> whole tensor. In one process these are the trained tensors themselves."""
        return self.group.call("full_weights")[0]

    def start_full_weights(self, *, merged: bool = False) -> Ref:
        """A reference to `full_weights`, for use in another process; `merged` as in
        ShardedBackend.iter_weights."""
        return self.group.start("full_weights", merged).refs[0]

    def load_weights(self, weights: Mapping[str, Tensor] | Ref) -> None:
        """Load whole tensors by their checkpoint names, or from a reference to them."""
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
        """See TrainingBackend. Operations of all ranks, duration of the slowest."""
        parts: list[Work] = self.group.call("take_work")
        return Work(
            infer_flops=sum(p.infer_flops for p in parts),
            infer_s=max(p.infer_s for p in parts),
            train_flops=sum(p.train_flops for p in parts),
            train_s=max(p.train_s for p in parts),
        )

    def held_bytes(self) -> HeldBytes:
        """See TrainingBackend. Summed over ranks."""
        parts: list[HeldBytes] = self.group.call("held_bytes")
        return HeldBytes(
            weights=sum(p.weights for p in parts),
            gradients=sum(p.gradients for p in parts),
            optimizer=sum(p.optimizer for p in parts),
            is_on_device=all(p.is_on_device for p in parts),
        )

    def state(self) -> dict[str, Any]:
        """See TrainingBackend. In the single-process form, so that any layout can resume from it."""
        return self.group.call("state")[0]

    def load(self, state: dict[str, Any]) -> None:
        """See TrainingBackend."""
        self.group.call("load", state)

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Write the state into `folder`, all ranks in parallel. Returns the part of the state that is not in
        files, and the files' entries for the checkpoint's manifest. Raises OSError."""
        written: list[Written] = self.group.call("save", str(folder.absolute()))
        for part in written:
            if part.error is not None:
                raise part.error
        return written[0].state, {name: line for part in written for name, line in part.files.items()}

    def restore(self, saved: dict[str, Any], folder: Path) -> None:
        """Restore what `save` of any layout returned and wrote. Raises CheckpointError if it belongs to
        another model."""
        self.group.call("restore", saved, str(folder.absolute()))


def share_rows(rows: Sequence[Sized], num_ranks: int, *, balances: bool) -> list[list[int]]:
    """Indices of the rows of each share. The rows of a trajectory stay together; those with the same prompt do
    if the shares remain about equal, since the prompt is then stored once. With `balances` shares have about
    equally many tokens, else equally many trajectories, in order."""
    trajectories = trajectories_of(rows)
    if not balances:
        bounds = np.linspace(0, len(trajectories), num_ranks + 1).round().astype(int).tolist()
        return [list(itertools.chain(*trajectories[a:b])) for a, b in itertools.pairwise(bounds)]
    total = sum(len(row) for row in rows)
    units: dict[int, list[list[int]]] = {}
    for trajectory in trajectories:
        units.setdefault(rows[trajectory[0]].group, []).append(trajectory)
    size_of = _size_of(rows)
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


def _size_of(rows: Sequence[Sized]) -> Callable[[Iterable[int]], int]:
    return lambda piece: sum(len(rows[i]) for i in piece)


def _halved(
    unit: list[list[int]], size_of: Callable[[Iterable[int]], int], most: float
) -> list[list[list[int]]]:
    """The trajectories of a group in pieces of at most `most` tokens, or of one trajectory."""
    if len(unit) == 1 or size_of(itertools.chain(*unit)) <= most:
        return [unit]
    middle = len(unit) // 2
    return _halved(unit[:middle], size_of, most) + _halved(unit[middle:], size_of, most)


def bare(row: Row) -> Row:
    """The row without fields, which a forward pass does not read."""
    return replace(row, fields={})
