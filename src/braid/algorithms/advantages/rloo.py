"""rloo: the reward minus the mean of the others in its group."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int

from .base import Advantage, Round, Tensor


class Rloo(Advantage):
    """The reward minus the mean reward of the other trajectories of the group
    ."""

    compares_group = True

    kind: Literal["rloo"] = "rloo"
    """The reward minus the mean of the others."""

    @property
    def is_centered(self) -> bool:
        return True

    @property
    def ignores_reward_mean(self) -> bool:
        return True

    def compute(self, round_: Round) -> Tensor:
        return round_.spread(leave_one_out_advantages(round_.totals, round_.groups))


def leave_one_out_advantages(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """rloo (arXiv 2402.14740): the reward minus the mean reward of the other rows in the group.

        A_b = r_b - sum_{j in g, j != b} r_j / (n - 1) = (r_b - mean_g(r)) n / (n - 1)

    The baseline is independent of the row's own response, so the gradient is unbiased. A group of one gets 0.
    SkyRL: the same. Not in RLinf and ROLL.
    """
    from .groups import grouped

    statistics = grouped(rewards, groups)
    return (statistics.centered * statistics.count / (statistics.count - 1).clamp(min=1)).to(rewards.dtype)
