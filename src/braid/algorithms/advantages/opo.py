"""opo: the reward relative to the length-weighted mean of its group."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int

from .base import Advantage, Round, Tensor


class Opo(Advantage):
    """The reward minus the mean reward of the group, in which each trajectory weighs as much as it has policy
    tokens."""

    compares_group = True

    kind: Literal["opo"] = "opo"
    """The reward relative to the length-weighted mean of its group."""

    @property
    def ignores_reward_mean(self) -> bool:
        return True

    def compute(self, round_: Round) -> Tensor:
        import torch

        positions = torch.split(round_.mask, list(round_.lengths))
        num_tokens = torch.stack([mask.sum() for mask in positions])
        return round_.spread(length_weighted_advantages(round_.totals, round_.groups, num_tokens))


def length_weighted_advantages(
    rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], lengths: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """opo (arXiv 2505.23585): A_b = r_b - sum_g(l r) / sum_g(l), l the number of policy tokens.

    The baseline of least variance weighs a trajectory by the squared norm of the gradient of its log-prob,
    which is taken to grow with its length. Exactly 0 for a group of one and for equal rewards. Not in RLinf,
    ROLL and SkyRL; verl's opo is the same.
    """
    import torch

    from .groups import grouped

    centered = grouped(rewards, groups).centered
    _, group = groups.unique(return_inverse=True)
    weights = lengths.double()
    zeros = torch.zeros_like(centered)
    total = zeros.index_add(0, group, weights)[group].clamp(min=1.0)
    return (centered - zeros.index_add(0, group, weights * centered)[group] / total).to(rewards.dtype)
