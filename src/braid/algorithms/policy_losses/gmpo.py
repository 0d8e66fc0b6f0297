"""gmpo: the geometric mean of clipped token ratios."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from .base import PolicyLoss, Surrogate, Tokens


class Gmpo(PolicyLoss):
    """Geometric mean of a sequence's clipped token ratios (Zhao et al. 2025, arXiv 2507.20673).

        loss_t = -A_t exp(c_t - sg(c_t) + sg(mean_s c))
        c_t = min(d_t, clip_high) where A_t > 0, max(d_t, -clip_low) where A_t < 0

    d_t is the log-ratio of the token to the old policy, s its sequence. As in PPO a token is clipped only
    where it has moved with its advantage. With sequence_mean_token_mean and one advantage per sequence, value
    and gradient are those of -A exp(mean_s c), the paper's. Not in RLinf, ROLL and SkyRL; verl's geo_mean is
    the same.
    """

    metrics = {"clip_fraction": "Share of tokens whose log-ratio is clipped."}

    kind: Literal["gmpo"] = "gmpo"
    """The geometric mean of clipped token ratios."""
    clip_low: NonNegativeFloat = 0.4
    """Log-ratios below -clip_low are clipped for negative advantages."""
    clip_high: NonNegativeFloat = 0.4
    """Log-ratios above clip_high are clipped for positive advantages."""

    @property
    def reads_sequences(self) -> bool:
        return True

    def per_token(self, tokens: Tokens) -> Surrogate:
        import torch

        from braid.algorithms.surrogate import LOG_RATIO_BOUND

        log_ratio, advantages = tokens.logprobs - tokens.old_logprobs, tokens.advantages
        high = torch.where(advantages > 0, self.clip_high, LOG_RATIO_BOUND)
        low = torch.where(advantages < 0, -self.clip_low, -LOG_RATIO_BOUND)
        clipped = log_ratio.clamp(low, high)
        is_clipped = clipped != log_ratio
        moved = clipped.detach()
        mean = moved if tokens.sequences is None else tokens.sequences.mean(moved)
        ratio = (clipped - moved + mean).exp()
        return -advantages * ratio, {"clip_fraction": is_clipped.to(ratio.dtype)}
