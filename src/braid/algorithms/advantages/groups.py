"""Statistics of the rewards of a group.

They are computed in float64. A row is always one valid trajectory; group ids are arbitrary integers, and
groups may differ in size and be in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

EQUAL_RELATIVE, EQUAL_ABSOLUTE = 2.0**-23, 1e-12
"""Rewards of a group are equal if they differ by no more than this: by the resolution of float32 at the
largest of them, in which simulators report. Sums that were rounded differently would otherwise be divided by
their tiny deviation."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Statistics of each row's group, broadcast to rows: float64 [B] each; `std` is unbiased (divisor n - 1).

    `centered` is the reward minus its group's mean. `centered` and `std` are exactly 0 if all rewards of the
    group are equal, up to EQUAL_RELATIVE and EQUAL_ABSOLUTE.
    """

    count: Tensor
    mean: Tensor
    std: Tensor
    centered: Tensor


def grouped(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Grouped:
    """Compute the statistics of each row's group."""
    _, group = groups.unique(return_inverse=True)
    zeros = torch.zeros(len(groups), dtype=torch.float64, device=rewards.device)  # at most one group per row
    count = zeros.index_add(0, group, torch.ones_like(zeros))[group]
    exact = rewards.double()
    lowest, _, is_equal = extremes(exact, group)
    # Subtracting the group's minimum first makes equal rewards exactly 0, without rounding errors.
    above = torch.where(is_equal, 0.0, exact - lowest)
    mean = zeros.index_add(0, group, above)[group] / count
    centered = above - mean
    variance = zeros.index_add(0, group, centered.square())[group] / (count - 1).clamp(min=1)
    return Grouped(count, lowest + mean, variance.sqrt(), centered)


def extremes(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lowest and the highest reward of each row's group, and whether all of it are equal."""

    def over_group(reduce: str) -> Tensor:
        return rewards.scatter_reduce(0, group, rewards, reduce, include_self=False)[group]

    lowest, highest = over_group("amin"), over_group("amax")
    tolerance = EQUAL_ABSOLUTE + EQUAL_RELATIVE * torch.maximum(lowest.abs(), highest.abs())
    return lowest, highest, highest - lowest <= tolerance


def reward_std(rewards: Sequence[float]) -> float:
    """Unbiased standard deviation of one group's rewards; exactly 0 if they are equal, as in `grouped`."""
    values = torch.tensor(rewards, dtype=torch.float64)
    return float(grouped(values, torch.zeros(len(values), dtype=torch.long)).std[0])
