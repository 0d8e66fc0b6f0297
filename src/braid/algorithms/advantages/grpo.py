"""grpo: the reward relative to the mean of its group."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int

from braid.types import AdvantageLevel

from .base import Advantage, Round, Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation that rewards are divided by; as in RLinf, ROLL and SkyRL."""


class Grpo(Advantage):
    """Each trajectory's reward relative to its group's, or each turn's relative to all turns of the group
    ."""

    compares_group = True

    kind: Literal["grpo"] = "grpo"
    """The reward relative to its group's."""
    normalize_by_std: bool = True
    """Divide by the group's standard deviation."""
    level: AdvantageLevel = "trajectory"
    """Compare one reward per trajectory, or one per turn, within the group."""

    @property
    def is_centered(self) -> bool:
        return self.level == "trajectory"

    @property
    def has_unit_std(self) -> bool:
        return self.level == "trajectory" and self.normalize_by_std

    @property
    def ignores_reward_mean(self) -> bool:
        return self.level == "trajectory"

    def compute(self, round_: Round) -> Tensor:
        by_std = self.normalize_by_std
        if self.level == "turn":
            turns = round_.turns()
            return turns.spread(group_advantages(turns.rewards, turns.groups, normalize_by_std=by_std))
        return round_.spread(group_advantages(round_.totals, round_.groups, normalize_by_std=by_std))


def group_advantages(
    rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, normalize_by_std: bool
) -> Float[Tensor, "B"]:
    """grpo: the reward relative to the mean of its group.

        A_b = r_b - mean_g(r)                            normalize_by_std = False (Dr. GRPO, arXiv 2503.20783)
        A_b = (r_b - mean_g(r)) / (std_g(r) + 1e-6)      normalize_by_std = True  (GRPO, arXiv 2402.03300)

    Exactly 0 for a group of one and for a group with equal rewards. A "row" may also be a turn: RLinf's
    grpo_dynamic compares the rewards of all turns of a group in this way.

    The mean includes the row itself, so without std the expected gradient for groups of G is (G - 1) / G
    times the true one. RLinf and ROLL use the same formula (in ROLL's agentic pipelines, grpo itself does not
    normalise); SkyRL uses the raw reward for a group of one.
    """
    from .groups import grouped

    statistics = grouped(rewards, groups)
    advantages = (
        statistics.centered / (statistics.std + STD_EPSILON) if normalize_by_std else statistics.centered
    )
    return advantages.to(rewards.dtype)
