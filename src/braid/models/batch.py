"""A packed batch: rows laid end to end in flat tensors, with the places where one ends and the next begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # it brings transformers
    from .sequence_parallel import SequenceGroup


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B rows of together T positions. Never padded.

    `inputs` and `fields` are the rows' arrays concatenated along T; `mask` [T] is True where the policy wrote.
    `lengths` [B] are on the host. `row` [T] numbers each position's row within this batch, `positions` [T] its
    place within the row. `weights` [T] is each position's share of the step's loss (see algorithms.aggregate).

    Rows of a group begin alike: `shared` [B] may say that the first `n` positions of a row are those of an earlier row,
    as (that row, n). They are stored once, with the earlier row, and T counts them once. (0, 0) and the empty tuple stand
    for nothing shared.

    With `sequence` the model runs a piece of the T positions here and the rest on the other ranks of that group; what comes
    out is of all T.
    """

    inputs: dict[str, Tensor]
    mask: Tensor
    lengths: tuple[int, ...]
    fields: dict[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    shared: tuple[tuple[int, int], ...] = ()
    sequence: SequenceGroup | None = None

    @property
    def num_positions(self) -> int:
        return sum(self.stored)

    @property
    def stored(self) -> tuple[int, ...]:
        """Positions [B] stored with each row: its length without what it shares."""
        if not self.shared:
            return self.lengths
        return tuple(length - num for length, (_, num) in zip(self.lengths, self.shared, strict=True))

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each row's stored positions begin [B]."""
        return tuple(accumulate(self.stored, initial=0))[:-1]

    @property
    def device(self) -> torch.device:
        return self.mask.device

    @property
    def row(self) -> Tensor:
        stored = torch.tensor(self.stored, device=self.device)
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.device), stored)

    @property
    def positions(self) -> Tensor:
        begin = [num for _, num in self.shared] or [0] * len(self.lengths)
        spans = zip(begin, self.lengths, strict=True)
        return torch.cat([torch.arange(start, end) for start, end in spans]).to(self.device)

    @property
    def previous(self) -> Tensor:
        """Where the position before each one in its row is stored [T]; -1 at the first of a row."""
        before = torch.arange(-1, self.num_positions - 1)
        starts = self.starts
        for row, start in enumerate(starts):
            source, num = self.shared[row] if self.shared else (0, 0)
            before[start] = starts[source] + num - 1 if num else -1
        return before.to(self.device)
