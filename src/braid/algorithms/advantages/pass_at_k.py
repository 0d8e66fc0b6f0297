"""pass_at_k: the advantage of k answers of which one must be right."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int
from pydantic import PositiveInt

from .base import Advantage, Round, Tensor


class PassAtK(Advantage):
    """The advantage of a trajectory as one of k of its group that together succeed if one of them does."""

    compares_group = True
    ignores_reward_scale = True

    kind: Literal["pass_at_k"] = "pass_at_k"
    """pass@k training: k answers succeed if one of them is right."""
    k: PositiveInt = 4
    """Answers of a set, fewer than the group has. A reward above 0 is right."""

    @property
    def least_group(self) -> int:
        return self.k + 1

    def compute(self, round_: Round) -> Tensor:
        return round_.spread(pass_at_k_advantages(round_.totals, round_.groups, k=self.k))


def pass_at_k_advantages(
    rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, k: int
) -> Float[Tensor, "B"]:
    """pass_at_k (Chen et al. 2025, arXiv 2508.10751), in closed form over all sets of k:

        R = 1 - C(w, k) / C(n, k)                             s = sqrt(R (1 - R))
        A_b = (1 - R) / s                                     if r_b > 0
        A_b = (1 - R - C(w - 1, k - 1) / C(n - 1, k - 1)) / s  otherwise

    n is the size of the group, w the number of wrong trajectories, R the mean reward of a set and s its
    standard deviation; a trajectory has the mean advantage of the sets that contain it. 0 where R is 0 or 1,
    as it is in a group of at most k trajectories, which is one set. With k = 1 this is grpo for rewards of 0
    and 1, with the biased standard deviation. Not in RLinf, ROLL and SkyRL.
    """
    import torch

    _, group = groups.unique(return_inverse=True)
    zeros = torch.zeros(len(groups), dtype=torch.float64, device=rewards.device)
    is_right = rewards > 0
    size = zeros.index_add(0, group, torch.ones_like(zeros))[group]
    wrong = zeros.index_add(0, group, (~is_right).double())[group]
    all_wrong, others_wrong = torch.ones_like(zeros), torch.ones_like(zeros)
    for i in range(k):  # C(w, k) / C(n, k), and the same of the others of a wrong trajectory
        is_drawn = i < size
        share = (wrong - i).clamp(min=0.0) / (size - i).clamp(min=1.0)
        all_wrong = torch.where(is_drawn, all_wrong * share, all_wrong)
        if i > 0:
            others_wrong = torch.where(is_drawn, others_wrong * share, others_wrong)
    deviation = (all_wrong * (1.0 - all_wrong)).sqrt()
    above_mean = torch.where(is_right, all_wrong, all_wrong - others_wrong)
    return torch.where(deviation > 0, above_mean / deviation, 0.0).to(rewards.dtype)
