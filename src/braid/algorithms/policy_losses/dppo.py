"""dppo: a trust region on the token's probability."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from .base import RatioLoss, Surrogate, Tokens


class Dppo(RatioLoss):
    """Trust region on the token's probability instead of its ratio (Qi et al. 2026, arXiv 2602.04879, binary
    divergences).

        loss = -rho A, but 0 where A pushes a token further out of the trust region:
               A > 0, p > q and D > clip_high;  or A < 0, p < q and D > clip_low
        tv     D = |p - q|                                           p = exp(logprobs), q = exp(old_logprobs)
        kl     D = q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))

    A rare token may thus change by a large factor, a likely one only by a small one.

    q is the sampling engine's probability, as in the paper, if old_logprobs=behavior; otherwise that of the
    policy before the update. Not in RLinf and ROLL. SkyRL: the same, with the sampling engine's.
    """

    metrics = {"clip_fraction": "Share of tokens whose loss is set to 0."}

    kind: Literal["dppo"] = "dppo"
    """A trust region on the token's probability."""
    divergence: Literal["tv", "kl"] = "tv"
    """Bounded divergence between Bernoulli distributions with a token's old and current probability."""
    clip_low: NonNegativeFloat = 0.2
    """Bound on the divergence of a token that became less likely."""
    clip_high: NonNegativeFloat = 0.2
    """Bound on the divergence of a token that became likelier."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        import torch

        ratio, advantages = tokens.ratio, tokens.advantages
        new, old = tokens.logprobs.detach(), tokens.old_logprobs.detach()
        if self.divergence == "tv":
            rise = new.exp() - old.exp()
            is_outside = ((advantages > 0) & (rise > self.clip_high)) | (
                (advantages < 0) & (rise < -self.clip_low)
            )
        else:
            rest_new, rest_old = ((-x.expm1()).clamp(min=torch.finfo(x.dtype).tiny) for x in (new, old))
            moved = old.exp() * (old - new) + rest_old * (rest_old / rest_new).log()
            is_outside = ((advantages > 0) & (new > old) & (moved > self.clip_high)) | (
                (advantages < 0) & (new < old) & (moved > self.clip_low)
            )
        is_inside = (~is_outside).to(ratio.dtype)
        return -(is_inside * advantages) * ratio, {"clip_fraction": is_outside.to(ratio.dtype)}
