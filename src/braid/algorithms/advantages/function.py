"""A function of a user as an advantage."""

from __future__ import annotations

from typing import Any

from braid.kinds import CallsFunction

from .base import Advantage, Round, Tensor


class FunctionAdvantage(CallsFunction, Advantage):
    """A function of the rewards [N] (float64) and the groups [N] of a round's trajectories that returns the
    advantage of each [N], which all of its tokens have."""

    def of_rewards(self, rewards: Tensor, groups: Tensor) -> Any:
        """What the function returns."""
        return self._function(rewards, groups)

    def compute(self, round_: Round) -> Tensor:
        return round_.spread(self._function(round_.totals, round_.groups))
