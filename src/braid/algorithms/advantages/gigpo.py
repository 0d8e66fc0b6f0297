"""gigpo: trajectories of a group, and turns from the same state, are compared."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from .base import Advantage, Round, Tensor
from .grpo import group_advantages
from .reinforce import discounted_returns


class Gigpo(Advantage):
    """gigpo (arXiv 2505.10978): A = episode_weight A_E + turn_weight A_T.

    A_E is the grpo advantage. A_T applies the same formula to a turn's discounted return, G_k = r_k + gamma
    G_{k+1} over the following turns, relative to the turns of the same group that start from the same state,
    in any trajectory. A state that occurs once gets 0.

    ROLL normalizes the turn term only with a deprecated key, and pools equal states of different groups.
    RLinf and SkyRL do not implement gigpo.
    """

    compares_group = True
    reads_observations = True

    kind: Literal["gigpo"] = "gigpo"
    """Comparison of trajectories, and of turns from the same state."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """Discount factor per turn."""
    normalize_by_std: bool = True
    """Divide by the standard deviation of what is compared."""
    episode_weight: NonNegativeFloat = 1.0
    """Weight of the episode-level advantage, which compares trajectories."""
    turn_weight: NonNegativeFloat = 1.0
    """Weight of the turn-level advantage, which compares turns from the same state."""

    @model_validator(mode="after")
    def _weights(self) -> Gigpo:
        if self.episode_weight == self.turn_weight == 0:
            raise ValueError(
                "episode_weight and turn_weight are 0, so every advantage is 0; raise one of them"
            )
        return self

    def compute(self, round_: Round) -> Tensor:
        import torch

        turns, by_std = round_.turns(), self.normalize_by_std
        everywhere = torch.ones(len(turns.rewards), dtype=torch.bool)
        returns = discounted_returns(turns.rewards, everywhere, turns.lengths, gamma=self.gamma)
        of_episodes = round_.spread(group_advantages(round_.totals, round_.groups, normalize_by_std=by_std))
        of_turns = turns.spread(group_advantages(returns, round_.states(), normalize_by_std=by_std))
        return self.episode_weight * of_episodes + self.turn_weight * of_turns
