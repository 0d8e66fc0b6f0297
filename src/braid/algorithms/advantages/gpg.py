"""gpg: the reward minus its group's mean, scaled up for the groups without signal."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int

from .base import Advantage, Round, Tensor


class Gpg(Advantage):
    """The reward minus the mean of its group, times the trajectories of the round over those in groups whose
    rewards differ."""

    compares_group = True

    kind: Literal["gpg"] = "gpg"
    """The centred reward, scaled by the share of groups with a signal."""

    @property
    def ignores_reward_mean(self) -> bool:
        return True

    def compute(self, round_: Round) -> Tensor:
        return round_.spread(rescaled_advantages(round_.totals, round_.groups))


def rescaled_advantages(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """gpg (arXiv 2504.02546): A_b = alpha (r_b - mean_g(r)), alpha = N / (N - M).

    N is the number of trajectories of the round, M of those in groups with equal rewards, which have no
    gradient but count in the loss's denominators; alpha undoes that. The paper's F_norm is 1. Not in RLinf,
    ROLL and SkyRL. verl's gpg counts the trajectories with a reward other than 0 as N - M instead.
    """
    from .groups import grouped

    statistics = grouped(rewards, groups)
    num_with_signal = int((statistics.std > 0).sum())
    alpha = len(rewards) / num_with_signal if num_with_signal else 1.0
    return (alpha * statistics.centered).to(rewards.dtype)
