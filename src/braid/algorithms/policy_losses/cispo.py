"""cispo: a policy gradient with a clipped importance weight."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from .base import RatioLoss, Surrogate, Tokens


class Cispo(RatioLoss):
    """Policy gradient of every token, with a clipped importance weight (MiniMax 2025, arXiv 2506.13585).

        loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi

    Where PPO's clip binds, a token has no gradient; here it has one, weighted by the bound. clip_low = 1 and
    clip_high = 0 give truncated importance sampling, clip(rho, 0, 1), which ROLL calls tis. With `mask` the
    loss is 0 at the tokens that PPO would clip (the paper's unified formulation, eq. 6 and 7):

        A > 0 and rho > 1 + clip_high, or A < 0 and rho < 1 - clip_low

    Not in RLinf. ROLL: bounds of 0.1, which its files cannot change; nor can they set its mask. SkyRL: the
    same without mask, [0, 5].
    """

    metrics = {"clip_fraction": "Share of tokens whose weight is not the ratio."}

    kind: Literal["cispo"] = "cispo"
    """The policy gradient with a clipped weight."""
    clip_low: NonNegativeFloat = 1.0
    """Weights below 1 - clip_low are clipped."""
    clip_high: NonNegativeFloat = 4.0
    """Weights above 1 + clip_high are clipped."""
    mask: bool = False
    """Exclude the tokens that PPO would clip from the loss, without changing its denominator."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        import torch

        weight = tokens.ratio.detach()
        clipped = weight.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        is_clipped = clipped != weight
        if self.mask:
            moves_away = (tokens.advantages > 0) == (weight > 1.0)
            clipped = torch.where(is_clipped & moves_away, 0.0, clipped)
        loss = -(clipped * tokens.advantages) * tokens.logprobs
        return loss, {"clip_fraction": is_clipped.to(weight.dtype)}
