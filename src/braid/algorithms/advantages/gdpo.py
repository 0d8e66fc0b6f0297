"""gdpo: each reward part is normalized within its group before the parts are summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from jaxtyping import Float, Int

from .base import Advantage, Round, Tensor


class Gdpo(Advantage):
    """The sum of the reward parts, each of which is first normalised within its group.

    A part that varies little counts as much as one that varies a lot, and answers with the same sum by
    different parts differ."""

    compares_group = True

    kind: Literal["gdpo"] = "gdpo"
    """Each reward part minus its mean in the group, divided by its standard deviation there; then the sum."""
    weights: Mapping[str, float] | None = None
    """Weight of each reward part in the sum; null: those of reward.parts. What the environment and shaping
    add to the reward is one part more, of weight 1."""

    def of_parts(self, weights: Mapping[str, float]) -> Gdpo:
        return self if self.weights is not None else self.model_copy(update={"weights": dict(weights)})

    @property
    def ignores_reward_mean(self) -> bool:
        return True

    def compute(self, round_: Round) -> Tensor:
        import torch

        weights = self.weights or {}
        firsts = [segments[0] for segments in round_.trajectories]
        scores = {
            name: torch.tensor([first.reward_parts.get(name, 0.0) for first in firsts], dtype=torch.float64)
            for name in weights
        }
        return round_.spread(decoupled_advantages(round_.totals, scores, weights, round_.groups))


def decoupled_advantages(
    rewards: Float[Tensor, "B"],
    scores: Mapping[str, Float[Tensor, "B"]],
    weights: Mapping[str, float],
    groups: Int[Tensor, "B"],
) -> Float[Tensor, "B"]:
    """gdpo (Liu et al. 2026, arXiv 2601.05242), before the normalisation over the batch:

        A_b = sum_k w_k (s_kb - mean_g s_k) / std_g s_k

    over the parts k, of which one more is what is left of the reward, r - sum_k w_k s_k. A part that is equal
    over the group adds 0. The deviation is unbiased (divisor n - 1). The paper then whitens over the batch:
    whiten_advantages, which weighs a trajectory by its positions. Not in RLinf, ROLL and SkyRL; TRL's
    normalize_then_sum is the same.
    """
    import torch

    from .groups import grouped

    total, left = torch.zeros_like(rewards), rewards
    for name, weight in weights.items():
        left = left - weight * scores[name]
    parts = [*((scores[name], weight) for name, weight in weights.items()), (left, 1.0)]
    for values, weight in parts:
        statistics = grouped(values, groups)
        total = total + weight * torch.where(statistics.std > 0, statistics.centered / statistics.std, 0.0)
    return total
