"""vespo: a policy gradient with a soft weight of the sequence's ratio."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from braid.types import RatioLevel

from .base import RatioLoss, Surrogate, Tokens


class Vespo(RatioLoss):
    """Policy gradient weighted by a gamma-shaped kernel of the sequence's ratio (arXiv 2602.10693).

        loss = -sg(phi(rho)) A log pi        phi(w) = w^k exp(lambda (1 - w))

    k and lambda go by the sign of A. phi(1) = 1; phi vanishes for sequences that have become much less or
    much more likely, and is largest at w = k / lambda. The paper's ratio is that to the sampling engine
    (old_logprobs=behavior). Not in RLinf, ROLL and SkyRL; TRL's vespo is the same.
    """

    kind: Literal["vespo"] = "vespo"
    """A policy gradient with a soft weight of the sequence's ratio."""
    ratio_level: RatioLevel = "sequence_product"
    """Level of the probability ratio, as in ppo_clip."""
    k_positive: NonNegativeFloat = 2.0
    """Exponent of the ratio for positive advantages."""
    lambda_positive: NonNegativeFloat = 3.0
    """Rate of decay in the ratio for positive advantages."""
    k_negative: NonNegativeFloat = 3.0
    """Exponent of the ratio for other advantages."""
    lambda_negative: NonNegativeFloat = 2.0
    """Rate of decay in the ratio for other advantages."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        from braid.algorithms.surrogate import by_sign

        ratio, advantages = tokens.ratio.detach(), tokens.advantages
        k = by_sign(advantages, self.k_positive, self.k_negative)
        decay = by_sign(advantages, self.lambda_positive, self.lambda_negative)
        weight = (k * ratio.log() + decay * (1.0 - ratio)).exp()
        return -(weight * advantages) * tokens.logprobs, {}
