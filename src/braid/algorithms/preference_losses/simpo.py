"""simpo: preference optimization without a reference."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from .base import Pairs, PreferenceLoss, Tensor


class Simpo(PreferenceLoss):
    """SimPO (Meng et al. 2024, arXiv 2405.14734, eq. 6): no reference, and a margin.

    loss = -log s(beta (log p_c / n_c - log p_r / n_r) - gamma), with p the policy's probabilities
    """

    kind: Literal["simpo"] = "simpo"
    """Mean log-probs of tokens with a margin, and no reference."""
    beta: PositiveFloat = 2.0
    """Scale of the mean log-probs."""
    gamma: NonNegativeFloat = 1.0
    """Margin by which the scaled difference is to exceed 0."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        from torch.nn.functional import logsigmoid

        chosen, rejected = self.rewards(pairs)
        return -logsigmoid(chosen - rejected - self.gamma)

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """beta times the mean log-prob of a response's tokens."""
        return self.beta * pairs.chosen / pairs.num_chosen, self.beta * pairs.rejected / pairs.num_rejected
