"""Segments of a packed batch, for ratios and weights over turns or sequences.

Owns splitting a batch into segments, and sums and means over them. A row is never split, so neither depends
on packing or micro-batches.
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
    """The segments of T positions. Positions in `mask` [T] belong to segments.

    `index` [T] is the segment of each position, in 0..T - 1. `size` [T] is the number of masked positions in
    each position's segment, float64, at least 1.
    """

    mask: Tensor
    index: Tensor
    size: Tensor

    def sum(self, values: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        """Sum over each position's segment, broadcast to positions. `values` is not read outside the mask.

        Computed in float64, so that the order of positions does not affect the result.
        """
        return self._totals(values).to(values.dtype)

    def mean(self, values: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        """Mean over each position's segment; otherwise as `sum`."""
        return (self._totals(values) / self.size).to(values.dtype)

    def within(self, mask: Bool[Tensor, "T"]) -> Segments:
        """The same segments, restricted to the positions in `mask`."""
        kept = self.mask & mask
        return Segments(kept, self.index, _sum_by(self.index, kept.double()).clamp(min=1.0))

    def any(self, mask: Bool[Tensor, "T"]) -> Bool[Tensor, "T"]:
        """Whether `mask` is True at any position of each position's segment."""
        return _sum_by(self.index, (self.mask & mask).double()) > 0

    def _totals(self, values: Tensor) -> Tensor:
        return _sum_by(self.index, torch.where(self.mask, values, 0.0).double())


def segments(mask: Bool[Tensor, "T"], row: Int[Tensor, "T"], level: SegmentLevel) -> Segments:
    """The segments of a batch. `row` is the row index of each position; rows are contiguous.

    sequence: the masked positions of a row. turn: a run of contiguous masked positions of a row, so two turns
    without an environment token between them are one segment, and so is a simulator's episode.
    """
    index = row
    if level == "turn":
        begins = mask.clone()
        begins[1:] &= ~mask[:-1] | (row[1:] != row[:-1])
        index = (begins.cumsum(0) - 1).clamp(min=0)
    return Segments(mask, index, _sum_by(index, mask.double()).clamp(min=1.0))


def _sum_by(index: Tensor, values: Tensor) -> Tensor:
    """At each position, the sum of `values` over all positions with the same index, [T].

    There are at most T segments, so the number of segments is not needed, which avoids a GPU synchronisation.
    """
    return torch.zeros_like(values).index_add_(0, index, values)[index]
