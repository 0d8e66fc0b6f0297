"""Reward normalisation before advantages: by statistics of the group, of the round, or of the run so far.

Owns the statistics. Distributing a change of a row's total reward over its positions is left to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from braid.types import RewardStatistics

from .advantages.groups import grouped
from .advantages.grpo import STD_EPSILON


@dataclass(slots=True)
class RunningMoments:
    """Running mean and variance of all values so far, in float64: `squares` is the sum of squared deviations.

    Batches are merged by the parallel variant of Welford's algorithm (Chan, Golub and LeVeque 1979): all
    values count equally, without decay.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Float[Tensor, "B"]) -> None:
        """Add `values`."""
        if not len(values):
            return
        statistics = grouped(values, torch.zeros(len(values), dtype=torch.long, device=values.device))
        count, distance = self.count + len(values), float(statistics.mean[0]) - self.mean
        self.squares += (
            float(statistics.centered.square().sum()) + distance**2 * self.count * len(values) / count
        )
        self.mean += distance * len(values) / count
        self.count = count

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def load(self, state: Mapping[str, Any]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]


def reward_statistics(
    rewards: Float[Tensor, "B"],
    groups: Int[Tensor, "B"],
    *,
    mean: RewardStatistics,
    std: RewardStatistics,
    running: RunningMoments,
    sources: Int[Tensor, "B"] | None = None,
) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
    """(center, scale) of each row, float64; the normalised reward is (r - center) / scale.

        none      0; 1                    group     mean; std + 1e-6 of the row's group (source: source)
        batch     the same of all rows    running   the same of all rounds so far, this one included

    Standard deviations are unbiased. If one is exactly 0 (a single row, or equal rewards), the scale is 1.
    `running` must already contain this round's rewards. `mean` and `std` can be chosen independently: `group`
    and `batch` give Lite PPO (arXiv 2508.08221).

    ROLL: the same formula, but a group's standard deviation with any other mean fails with a shape error, and
    a standard deviation of 0 multiplies an uncentred reward by a million. RLinf and SkyRL: only the
    normalisation of grpo.
    """
    everyone = torch.zeros_like(groups)
    zeros = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)

    def moments(which: RewardStatistics) -> tuple[Tensor, Tensor]:
        if which == "none":
            return zeros, zeros
        if which == "running":
            return zeros + running.mean, zeros + running.std
        index = {"group": groups, "source": sources, "batch": everyone}[which]
        assert index is not None, "statistics by source need the sources"
        statistics = grouped(rewards, index)
        return (
            rewards.double() - statistics.centered,
            statistics.std,
        )  # exactly the reward itself in a group of equal ones

    center, (_, deviation) = moments(mean)[0], moments(std)
    return center, torch.where(deviation > 0, deviation + STD_EPSILON, 1.0)
