"""reinforce: the discounted return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from jaxtyping import Bool, Float
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

        if self.level == "turn":
            turns = round_.turns()
            everywhere = torch.ones(len(turns.rewards), dtype=torch.bool)
            returns = discounted_returns(turns.rewards, everywhere, turns.lengths, gamma=self.gamma)
            return turns.spread(returns)
        return discounted_returns(round_.rewards, round_.mask, round_.lengths, gamma=self.gamma)


def discounted_returns(
    rewards: Float[Tensor, "T"], mask: Bool[Tensor, "T"], lengths: Sequence[int], *, gamma: float
) -> Float[Tensor, "T"]:
    """reinforce (Williams 1992): discounted returns G_k = r_k + gamma G_{k+1} over the masked positions of a
    row.

    0 outside the mask; `rewards` is not read there. REINFORCE++ (arXiv 2501.03262) whitens the result.
    Without a critic there is no bootstrap value: the return of an episode cut by a time limit ends there.
    "Positions" may be turns, as in gigpo.

    ROLL: the same over the padded width, including rewards of environment tokens. SkyRL multiplies the
    running sum by the mask, so a turn receives no return from after the environment's reply. RLinf: gamma =
    1.
    """
    import torch

    from .discounting import discounted_suffix_sums, is_last_of_row, rows_of_positions

    row = rows_of_positions(lengths, mask)[mask]
    decay = gamma * (~is_last_of_row(row)).double()
    returns = torch.zeros_like(rewards)
    sums = discounted_suffix_sums(rewards[mask].double(), decay, max(lengths, default=0))
    returns[mask] = sums.to(rewards.dtype)
    return returns
