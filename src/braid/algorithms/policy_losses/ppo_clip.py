"""ppo_clip: the clipped surrogate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from .base import RatioLoss, Surrogate, Tokens


class PpoClip(RatioLoss):
    """The clipped surrogate (Schulman et al. 2017, arXiv 1707.06347).

        loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
        loss = min(loss, -dual_clip A)  where A < 0, unless dual_clip is off

    Unequal bounds are DAPO's clip-higher (arXiv 2503.14476). The dual clip bounds the loss of a token with a
    negative advantage whose probability has grown a lot (Ye et al. 2020, arXiv 1912.09729). Where a bound
    binds, the gradient is 0.

    RLinf: the same; its dual clip is 3 unless null. ROLL's dual clip is always 1 + 2 pg_clip. SkyRL: the
    same, with 3, as a separate loss.
    """

    metrics = {
        "clip_fraction": "Share of tokens where the clipped term is the larger loss.",
        "dual_clip_fraction": "Share of tokens where the dual clip is active.",
    }

    kind: Literal["ppo_clip"] = "ppo_clip"
    """The clipped surrogate of PPO."""
    clip_low: NonNegativeFloat = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: NonNegativeFloat = 0.2
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[float, Field(gt=1.0)] | Literal["off"] = "off"
    """Bound c > 1 on the ratio for negative advantages (dual-clip PPO); off for none."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        import torch

        ratio, advantages = tokens.ratio, tokens.advantages
        unclipped = -ratio * advantages
        clipped = -ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        loss = torch.maximum(unclipped, clipped)
        diagnostics = {"clip_fraction": (clipped > unclipped).to(loss.dtype)}
        if self.dual_clip != "off":
            bound = torch.where(advantages < 0, -self.dual_clip * advantages, torch.inf)
            diagnostics["dual_clip_fraction"] = (bound < loss).to(loss.dtype)
            loss = loss.clamp(max=bound)
        return loss, diagnostics
