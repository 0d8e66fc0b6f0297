"""Segments of a packed batch, for log-probs, ratios and weights of decisions or sequences.

Owns sums and means over segments. A decision lies within a row, and rows are never split; a loss that reads
whole trajectories is given them in one micro-batch (Loss.whole_trajectories). So neither sums nor means
depend on packing or micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


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


def segments(mask: Bool[Tensor, "T"], index: Int[Tensor, "T"]) -> Segments:
    """The masked positions with the same `index`, which is read only inside the mask and less than T: of
    each trajectory (PackedBatch.trajectory), or of each decision (PackedBatch.decision)."""
    index = index.long().clamp(min=0)
    return Segments(mask, index, _sum_by(index, mask.double()).clamp(min=1.0))


def first_positions(decision: Int[Tensor, "T"]) -> Bool[Tensor, "T"]:
    """True at the first position of each decision. `decision` numbers them, and is -1 outside."""
    is_first = decision >= 0
    is_first[1:] &= decision[1:] != decision[:-1]
    return is_first


def _sum_by(index: Tensor, values: Tensor) -> Tensor:
    """At each position, the sum of `values` over all positions with the same index, [T].

    There are at most T segments, so the number of segments is not needed, which avoids a GPU synchronisation.
    """
    return torch.zeros_like(values).index_add_(0, index, values)[index]
