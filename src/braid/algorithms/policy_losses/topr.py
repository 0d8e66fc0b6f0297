"""topr: imitation of good tokens, a truncated weight on the others."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from .base import RatioLoss, Surrogate, Tokens


class Topr(RatioLoss):
    """Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286).

        loss = -positive_weight A log pi                      where A > 0
        loss = -negative_weight sg(min(rho, 1)) A log pi      elsewhere

    Tokens with a positive advantage are imitated without importance weight; the others have a truncated one.
    The paper uses the ratio of the whole response, a product; here it is the ratio of a token, or the
    geometric mean set by ratio_level, because a product over hundreds of tokens is nearly always 0 or
    truncated. Not in RLinf and SkyRL. ROLL: token ratios, and the sign of the response's reward instead of A,
    which differs if a baseline is subtracted.
    """

    metrics = {"clip_fraction": "Share of tokens with a negative advantage and a truncated weight."}

    kind: Literal["topr"] = "topr"
    """Imitation of tokens with a positive advantage, a truncated weight on the others."""
    positive_weight: NonNegativeFloat = 1.0
    """Weight of tokens with a positive advantage."""
    negative_weight: NonNegativeFloat = 1.0
    """Weight of all other tokens."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        import torch

        from braid.algorithms.surrogate import by_sign

        rho, advantages = tokens.ratio.detach(), tokens.advantages
        bounded = torch.where(advantages > 0, 1.0, rho.clamp(max=1.0))
        weight = by_sign(advantages, self.positive_weight, self.negative_weight) * bounded
        is_clipped = (advantages < 0) & (rho > 1.0)
        return -(weight * advantages) * tokens.logprobs, {"clip_fraction": is_clipped.to(rho.dtype)}
