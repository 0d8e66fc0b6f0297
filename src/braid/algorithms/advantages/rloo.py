"""rloo: the reward minus the mean of the others in its group."""

from __future__ import annotations

from typing import Literal

from .base import Advantage, Round, Tensor


class Rloo(Advantage):
    """The reward minus the mean reward of the other trajectories of the group
    (formulas.leave_one_out_advantages)."""

    compares_group = True

    kind: Literal["rloo"] = "rloo"
    """The reward minus the mean of the others."""

    @property
    def ignores_reward_mean(self) -> bool:
        return True

    def compute(self, round_: Round) -> Tensor:
        from .formulas import leave_one_out_advantages

        return round_.spread(leave_one_out_advantages(round_.totals, round_.groups))
