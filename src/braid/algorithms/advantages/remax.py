"""remax: the reward minus that of the greedy answer."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float

from .base import Advantage, Round, Tensor


class Remax(Advantage):
    """The reward minus the reward of the greedy answer to the same prompt."""

    needs_greedy = True

    kind: Literal["remax"] = "remax"
    """The reward minus that of the greedy answer."""

    @property
    def ignores_reward_mean(self) -> bool:
        return True

    def compute(self, round_: Round) -> Tensor:
        import torch

        baselines = [trajectory[0].baseline for trajectory in round_.trajectories]
        assert None not in baselines, "remax needs the reward of each prompt's greedy answer"
        rewards = torch.tensor(baselines, dtype=torch.float64)
        return round_.spread(baseline_advantages(round_.totals, rewards))


def baseline_advantages(rewards: Float[Tensor, "B"], baselines: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """remax (arXiv 2310.10505): A_b = r_b - the reward of the greedy response to the same prompt.

    The greedy response depends only on prompt and policy, so the gradient is unbiased for groups of any size.
    Not in RLinf, ROLL and SkyRL.
    """
    return (rewards.double() - baselines.double()).to(rewards.dtype)
