"""apo_zero, apo_down: anchored preference optimization."""

from __future__ import annotations

from typing import Literal

from .base import Pairs, ReferenceLoss, Tensor


class ApoZero(ReferenceLoss):
    """Anchored preference optimization (D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7), for preferred
    responses that are better than the policy's own.

    loss = 1 - s(beta c) + s(beta r)
    """

    kind: Literal["apo_zero"] = "apo_zero"
    """Anchored preference optimization: raise the preferred response, lower the rejected one."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        chosen, rejected = self.ratios(pairs)
        return 1 - (self.beta * chosen).sigmoid() + (self.beta * rejected).sigmoid()


class ApoDown(ReferenceLoss):
    """Anchored preference optimization (arXiv 2408.06266, eq. 8), for a policy that is better than both
    responses: it lowers both, the rejected one further.

    loss = s(beta c) + 1 - s(beta h)
    """

    kind: Literal["apo_down"] = "apo_down"
    """Anchored preference optimization: lower both responses, the rejected one further."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        chosen, rejected = self.ratios(pairs)
        return (self.beta * chosen).sigmoid() + 1 - (self.beta * (chosen - rejected)).sigmoid()
