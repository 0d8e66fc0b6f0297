"""raft: imitation of the best of a group."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int

from .base import Advantage, Round, Tensor


class Raft(Advantage):
    """1 for the trajectory with the highest reward of its group, else 0."""

    compares_group = True
    ignores_reward_scale = True

    kind: Literal["raft"] = "raft"
    """1 for the best of the group, else 0."""

    @property
    def ignores_reward_mean(self) -> bool:
        return True

    def compute(self, round_: Round) -> Tensor:
        return round_.spread(best_of_group(round_.totals, round_.groups))


def best_of_group(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """raft (arXiv 2304.06767): 1 for the row with the highest reward of its group, the first one on a tie;
    else 0.

    With a plain policy gradient, the other rows add nothing to the numerator of the loss but still count in
    its denominators. A group with equal rewards gets 0 throughout, so that no row is imitated merely for
    being first; the paper would choose one at random. ROLL's RAFT++ is grpo without the standard deviation.
    """
    import torch

    from .groups import EQUAL_ABSOLUTE, EQUAL_RELATIVE, extremes

    _, group = groups.unique(return_inverse=True)
    exact = rewards.double()
    _, best, is_equal = extremes(exact, group)
    is_best = best - exact <= EQUAL_ABSOLUTE + EQUAL_RELATIVE * best.abs()
    nowhere = len(groups)
    places = torch.arange(nowhere, device=rewards.device)
    of_best = torch.where(is_best & ~is_equal, places, nowhere)
    first = of_best.scatter_reduce(0, group, of_best, "amin", include_self=False)[group]
    return (places == first).to(rewards.dtype)
