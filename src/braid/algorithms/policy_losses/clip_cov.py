"""clip_cov: no gradient for a few tokens that would reduce entropy most."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from .base import RatioLoss, Surrogate, Tensor, Tokens
from .ppo_clip import PpoClip


class ClipCov(RatioLoss):
    """ppo_clip without a few tokens that would reduce entropy most (Cui et al. 2025, arXiv 2505.22617).

        loss = (1 - is_chosen) ppo_clip(rho, A)

    `is_chosen` is 1 at the tokens that covariance.choose_within selected for the step, else 0.

    The paper selects by the current log-probs, among tokens that PPO does not clip. braid selects before the
    step, so the result does not depend on micro-batches, and a selected token may also be a clipped one.
    SkyRL selects at random in every micro-batch, by covariances of advantages that its reduction has already
    divided by the number of tokens, so almost none reaches the lower bound. Not in RLinf and ROLL.
    """

    selects_tokens = True
    metrics = {
        "clip_fraction": PpoClip.metrics["clip_fraction"],
        "chosen_fraction": "Share of tokens that were selected, and have no gradient.",
    }

    kind: Literal["clip_cov"] = "clip_cov"
    """ppo_clip without the tokens that would reduce entropy most."""
    clip_low: NonNegativeFloat = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: NonNegativeFloat = 0.2
    """Ratios above 1 + clip_high are clipped."""
    cov_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0002
    """Fraction of tokens left out, by covariance of advantage and log-prob."""
    cov_low: float = 1.0
    """Lowest covariance at which a token may be left out."""
    cov_high: float = 5.0
    """Highest covariance at which a token may be left out."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        loss, diagnostics = PpoClip(clip_low=self.clip_low, clip_high=self.clip_high).per_token(tokens)
        return loss * (1.0 - tokens.is_chosen), diagnostics | {"chosen_fraction": tokens.is_chosen}

    def select(self, covariances: Tensor, priorities: Tensor) -> Tensor:
        from braid.algorithms.covariance import choose_within

        return choose_within(
            covariances, priorities, fraction=self.cov_fraction, low=self.cov_low, high=self.cov_high
        )
