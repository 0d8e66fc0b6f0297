"""A function of a user as an advantage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import PrivateAttr

from .base import Advantage, Round, Tensor


class FunctionAdvantage(Advantage):
    """A function of the rewards [N] (float64) and the groups [N] of a round's trajectories that returns the
    advantage of each [N], which all of its tokens have."""

    _function: Callable[[Tensor, Tensor], Any] = PrivateAttr()

    @classmethod
    def calling(cls, function: Callable[[Tensor, Tensor], Any]) -> FunctionAdvantage:
        advantage = cls()
        advantage._function = function
        return advantage

    def of_rewards(self, rewards: Tensor, groups: Tensor) -> Any:
        """What the function returns."""
        return self._function(rewards, groups)

    def compute(self, round_: Round) -> Tensor:
        return round_.spread(self._function(round_.totals, round_.groups))
