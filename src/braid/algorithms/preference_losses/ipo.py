"""ipo: identity preference optimization."""

from __future__ import annotations

from typing import Literal

from .base import Pairs, ReferenceLoss, Tensor


class Ipo(ReferenceLoss):
    """Identity preference optimization (Azar et al. 2023, arXiv 2310.12036, eq. 17).

        loss = (h - 1 / (2 beta))^2

    The difference of log ratios is drawn to a finite number, also where preferences are certain. TRL divides
    the log ratios by the responses' lengths (length_normalized); ROLL and OpenRLHF do not.
    """

    kind: Literal["ipo"] = "ipo"
    """Identity preference optimization."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        return (self.difference(pairs) - 1 / (2 * self.beta)).square()
