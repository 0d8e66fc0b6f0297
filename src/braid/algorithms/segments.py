"""Runs of positions that a ratio or a weight is taken over: the turns or the sequences of a packed batch.

Owns cutting a batch into segments, and sums and means over them. A row is never cut, so neither depends on how a step is
packed or cut into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SegmentLevel = Literal["turn", "sequence"]


@dataclass(frozen=True, slots=True)
class Segments:
    """T positions, of which those of `mask` [T] are in segments; `index` [T] numbers each one's segment, from 0 to T - 1 at
    most. `size` [T] counts the masked positions of each position's own segment, in float64, and is at least 1.
    """

    mask: Tensor
    index: Tensor
    size: Tensor

    def sum(self, values: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        """Each position's value becomes the sum over its segment. Taken in float64: the order of positions does not show.
        What `values` holds outside the mask is not read."""
        return self._totals(values).to(values.dtype)

    def mean(self, values: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        """The same with the mean over the segment."""
        return (self._totals(values) / self.size).to(values.dtype)

    def within(self, mask: Bool[Tensor, "T"]) -> Segments:
        """The same segments without the positions that `mask` leaves out."""
        kept = self.mask & mask
        return Segments(kept, self.index, _sum_by(self.index, kept.double()).clamp(min=1.0))

    def any(self, mask: Bool[Tensor, "T"]) -> Bool[Tensor, "T"]:
        """Whether `mask` holds at any position of the segment that each position is in."""
        return _sum_by(self.index, (self.mask & mask).double()) > 0

    def _totals(self, values: Tensor) -> Tensor:
        return _sum_by(self.index, torch.where(self.mask, values, 0.0).double())


def segments(mask: Bool[Tensor, "T"], row: Int[Tensor, "T"], level: SegmentLevel) -> Segments:
    """The segments of a batch whose positions belong to the rows that `row` numbers, each row in one piece.

    sequence: the masked positions of a row. turn: masked positions of a row that follow each other without a gap, so that
    two turns with no token of the environment between them are one, and the episode of a simulator is one.
    """
    index = row
    if level == "turn":
        begins = mask.clone()
        begins[1:] &= ~mask[:-1] | (row[1:] != row[:-1])
        index = (begins.cumsum(0) - 1).clamp(min=0)
    return Segments(mask, index, _sum_by(index, mask.double()).clamp(min=1.0))


def _sum_by(index: Tensor, values: Tensor) -> Tensor:
    """[T]: at each position the sum of `values` over all positions with its index. As there are at most T segments, their
    number need not be known, and a GPU is not waited for."""
    return torch.zeros_like(values).index_add_(0, index, values)[index]
