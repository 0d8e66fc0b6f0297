"""A packed batch: rows concatenated in flat tensors, with their lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from braid.types import Placed

from .transfer import to_device

if TYPE_CHECKING:  # imports transformers
    from .sequence_parallel import SequenceGroup


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B rows with T positions in total, without padding.

    `inputs` and `fields` are the rows' arrays concatenated along T; `mask` [T] is True at positions that the
    policy wrote. `lengths` [B] are on the host. `positions` [T] is each position's index within its row.
    `trajectories` [B] numbers the trajectories that rows belong to; empty: each row is one. `weights` [T] is
    each position's weight in the step's loss (see algorithms.aggregate). `decision` [T] numbers the decisions
    of all rows, -1 outside the mask; `action_size` as in types.Row. `observations` are those of all rows, [K,
    ...], and `observed` [T] is the index of each position's observation.

    Rows of a group share prefixes: `shared` [B] holds (earlier row, n) if the first n positions of a row are
    those of an earlier row. They are stored once, with the earlier row, and T counts them once. (0, 0), or an
    empty tuple for the whole batch, means that nothing is shared.

    `images` are the images of each row [B], empty where no row has any. With `runs_tower` the vision tower
    runs also if there are none (see SingleBackend).

    `on_host` has copies of tensors of the batch in host memory, by name: to read them from a GPU, the host
    would wait for all that it has asked of it before.

    With `sequence` this rank runs a slice of the T positions and the other ranks of the group the rest;
    outputs cover all T.
    """

    inputs: dict[str, Tensor]
    mask: Tensor
    lengths: tuple[int, ...]
    fields: dict[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    decision: Tensor | None = None
    action_size: int = 1
    observations: dict[str, Tensor] = field(default_factory=dict)
    observed: Tensor | None = None
    shared: tuple[tuple[int, int], ...] = ()
    trajectories: tuple[int, ...] = ()
    sequence: SequenceGroup | None = None
    images: tuple[tuple[Placed, ...], ...] = ()
    runs_tower: bool = False
    on_host: Mapping[str, Tensor] = field(default_factory=dict)

    def host(self, name: Literal["mask", "observed"]) -> Tensor:
        """That tensor in host memory."""
        copy = self.on_host.get(name)
        return getattr(self, name).cpu() if copy is None else copy

    def with_mask(self, mask: Tensor) -> PackedBatch:
        """With another mask, for a loss."""
        on_host = {name: tensor for name, tensor in self.on_host.items() if name != "mask"}
        return replace(self, mask=mask, on_host=on_host)

    @property
    def num_positions(self) -> int:
        return sum(self.stored)

    @property
    def stored(self) -> tuple[int, ...]:
        """Number of positions stored with each row [B]: its length without the shared prefix."""
        if not self.shared:
            return self.lengths
        return tuple(length - num for length, (_, num) in zip(self.lengths, self.shared, strict=True))

    @property
    def starts(self) -> tuple[int, ...]:
        """Offset of each row's stored positions [B]."""
        return tuple(accumulate(self.stored, initial=0))[:-1]

    @property
    def device(self) -> torch.device:
        return self.mask.device

    @property
    def trajectory(self) -> Tensor:
        """The number of each position's trajectory [T]."""
        of_rows = torch.tensor(self.trajectories or range(len(self.lengths)))
        return to_device(of_rows.repeat_interleave(torch.tensor(self.stored)), self.device)

    @property
    def num_rows_at(self) -> Tensor:
        """The number of rows that have each stored position [T], as float32."""
        counts = torch.ones(self.num_positions)
        for source, num in self.shared:
            counts[self.starts[source] : self.starts[source] + num] += 1
        return to_device(counts, self.device)

    @property
    def positions(self) -> Tensor:
        begin = [num for _, num in self.shared] or [0] * len(self.lengths)
        spans = zip(begin, self.lengths, strict=True)
        return to_device(torch.cat([torch.arange(start, end) for start, end in spans]), self.device)

    @property
    def unit(self) -> Tensor:
        """Each position's index within its decision [T]; 0 outside the mask."""
        assert self.decision is not None, "batches of rows carry the index of decisions"
        index = torch.arange(len(self.decision), device=self.device)
        is_next = torch.ones_like(self.mask)
        is_next[1:] = self.decision[1:] != self.decision[:-1]
        return torch.where(self.mask, index - (index * is_next).cummax(0).values, 0)

    @property
    def previous(self) -> Tensor:
        """Index at which each position's predecessor in its row is stored [T], in host memory; -1 for the
        first position of a row."""
        before = torch.arange(-1, self.num_positions - 1)
        starts = self.starts
        for row, start in enumerate(starts):
            source, num = self.shared[row] if self.shared else (0, 0)
            before[start] = starts[source] + num - 1 if num else -1
        return before
