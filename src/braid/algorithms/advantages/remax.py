"""remax: the reward minus that of the greedy answer."""

from __future__ import annotations

from typing import Literal

from .base import Advantage, Round, Tensor


class Remax(Advantage):
    """The reward minus the reward of the greedy answer to the same prompt (formulas.baseline_advantages)."""

    needs_greedy = True

    kind: Literal["remax"] = "remax"
    """The reward minus that of the greedy answer."""

    @property
    def ignores_reward_mean(self) -> bool:
        return True

    def compute(self, round_: Round) -> Tensor:
        import torch

        from .formulas import baseline_advantages

        baselines = [trajectory[0].baseline for trajectory in round_.trajectories]
        assert None not in baselines, "remax needs the reward of each prompt's greedy answer"
        rewards = torch.tensor(baselines, dtype=torch.float64)
        return round_.spread(baseline_advantages(round_.totals, rewards))
