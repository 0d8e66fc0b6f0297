"""sapo: a soft gate in place of the clip."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from .base import RatioLoss, Surrogate, Tokens


class Sapo(RatioLoss):
    """Soft gate in place of the clip (Gao et al. 2025, arXiv 2511.20347).

        loss = -A (4 / tau) sigmoid(tau (rho - 1))        tau = tau_positive where A > 0, else tau_negative

    At rho = 1 the gradient is that of the ratio itself. It decays on both sides, faster for a larger tau: at
    rho = 1 + x by the factor 4 s (1 - s), with s = sigmoid(tau x). Not in RLinf and ROLL. SkyRL: the same.
    """

    kind: Literal["sapo"] = "sapo"
    """A soft gate in place of the clip."""
    tau_positive: PositiveFloat = 1.0
    """Temperature of the gate for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """Temperature of the gate for negative advantages."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        from braid.algorithms.surrogate import by_sign

        tau = by_sign(tokens.advantages, self.tau_positive, self.tau_negative)
        return (-4.0 * tokens.advantages / tau) * (tau * (tokens.ratio - 1.0)).sigmoid(), {}
