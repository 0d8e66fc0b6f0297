"""masked_is: importance weights within bounds, no other tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from .base import RatioLoss, Surrogate, Tokens


class MaskedIs(RatioLoss):
    """cispo that masks tokens instead of clipping their weight (GLM-5, 2026, after IcePop, arXiv 2510.18855).

        loss = -sg(rho 1[1 - clip_low < rho < 1 + clip_high]) A log pi

    Meant for ratios to the sampling engine (old_logprobs=behavior). Masked tokens still count in the
    denominators. Not in RLinf and ROLL. SkyRL: the same, as rollout_is.
    """

    metrics = {"clip_fraction": "Share of tokens that are masked."}

    kind: Literal["masked_is"] = "masked_is"
    """The policy gradient of tokens whose ratio is within bounds."""
    clip_low: NonNegativeFloat = 0.2
    """Tokens with a ratio below 1 - clip_low are excluded."""
    clip_high: NonNegativeFloat = 0.2
    """Tokens with a ratio above 1 + clip_high are excluded."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        weight = tokens.ratio.detach()
        is_inside = ((weight > 1.0 - self.clip_low) & (weight < 1.0 + self.clip_high)).to(weight.dtype)
        loss = -(is_inside * weight * tokens.advantages) * tokens.logprobs
        return loss, {"clip_fraction": 1.0 - is_inside}
