"""sppo_hard: self-play preference optimization with certain preferences."""

from __future__ import annotations

from typing import Literal

from .base import Pairs, ReferenceLoss, Tensor


class SppoHard(ReferenceLoss):
    """Self-play preference optimization (Wu et al. 2024, arXiv 2405.00675) with win probabilities of 1 and 0.

    loss = (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2
    """

    kind: Literal["sppo_hard"] = "sppo_hard"
    """Self-play preference optimization with certain preferences."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        chosen, rejected = self.ratios(pairs)
        goal = 1 / (2 * self.beta)
        return (chosen - goal).square() + (rejected + goal).square()
