"""reinforce: the discounted return."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from braid.types import AdvantageLevel

from .base import Advantage, Round, Tensor


class Reinforce(Advantage):
    """The discounted return (Williams 1992), over positions or turns (ROLL's agentic_reinforce)."""

    kind: Literal["reinforce"] = "reinforce"
    """The discounted return."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount factor per position, or per turn with level=turn."""
    level: AdvantageLevel = "trajectory"
    """turn: one return per turn, of the rewards of this and the following turns."""

    def compute(self, round_: Round) -> Tensor:
        import torch

        from .formulas import discounted_returns

        if self.level == "turn":
            turns = round_.turns()
            everywhere = torch.ones(len(turns.rewards), dtype=torch.bool)
            returns = discounted_returns(turns.rewards, everywhere, turns.lengths, gamma=self.gamma)
            return turns.spread(returns)
        return discounted_returns(round_.rewards, round_.mask, round_.lengths, gamma=self.gamma)
