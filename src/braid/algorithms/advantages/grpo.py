"""grpo: the reward relative to the mean of its group."""

from __future__ import annotations

from typing import Literal

from braid.types import AdvantageLevel

from .base import Advantage, Round, Tensor


class Grpo(Advantage):
    """Each trajectory's reward relative to its group's, or each turn's relative to all turns of the group
    (formulas.group_advantages)."""

    compares_group = True

    kind: Literal["grpo"] = "grpo"
    """The reward relative to its group's."""
    normalize_by_std: bool = True
    """Divide by the group's standard deviation."""
    level: AdvantageLevel = "trajectory"
    """Compare one reward per trajectory, or one per turn, within the group."""

    @property
    def ignores_reward_mean(self) -> bool:
        return self.level == "trajectory"

    def compute(self, round_: Round) -> Tensor:
        from .formulas import group_advantages

        by_std = self.normalize_by_std
        if self.level == "turn":
            turns = round_.turns()
            return turns.spread(group_advantages(turns.rewards, turns.groups, normalize_by_std=by_std))
        return round_.spread(group_advantages(round_.totals, round_.groups, normalize_by_std=by_std))
