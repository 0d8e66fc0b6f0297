"""maxrl: the reward relative to the pass rate of its prompt."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int

from .base import Advantage, Round, Tensor

MEAN_EPSILON = 1e-6
"""Added to the mean that maxrl divides by; as in SkyRL."""


class MaxRl(Advantage):
    """The reward minus the group's mean, divided by that mean."""

    compares_group = True
    divides_by_mean = True

    kind: Literal["maxrl"] = "maxrl"
    """The reward relative to the pass rate of its prompt."""

    def compute(self, round_: Round) -> Tensor:
        return round_.spread(likelihood_advantages(round_.totals, round_.groups))


def likelihood_advantages(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """maxrl (arXiv 2602.02710): A_b = (r_b - mean_g(r)) / (mean_g(r) + 1e-6).

    Meant for rewards of 0 and 1, whose mean estimates the pass rate p of a prompt: the expected gradient for
    groups of G is that of the first G - 1 terms of log p = -sum_k (1 - p)^k / k, whereas the plain policy
    gradient has only the first. Prompts that are rarely solved therefore weigh more, as under maximum
    likelihood. Rewards between 0 and 1 act as partial success. With negative rewards the mean is not a
    pass rate: it may be close to 0 or flip the sign of the gradient. A group whose mean is not positive
    therefore gets 0. SkyRL: the plain formula, and the raw reward for a group of one.
    """
    import torch

    from .groups import grouped

    statistics = grouped(rewards, groups)
    relative = statistics.centered / (statistics.mean + MEAN_EPSILON)
    return torch.where(statistics.mean > 0, relative, 0.0).to(rewards.dtype)
