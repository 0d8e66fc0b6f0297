"""sequence_mask: ppo_clip without bad answers that the policy has moved away from."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from .base import RatioLoss, Surrogate, Tokens
from .ppo_clip import PpoClip


class SequenceMask(RatioLoss):
    """ppo_clip without off-policy sequences of negative advantage (DeepSeek-V3.2, arXiv 2512.02556).

        loss_t = M_t ppo_clip(rho, A)
        M_t = 0 where A_t < 0 and mean_s(old_logprobs - logprobs) > max_gap, else 1

    s is the sequence of t. An answer that is already much less likely than when it was sampled teaches little
    and disturbs the policy; good answers are kept however far it has moved. Masked tokens still count in the
    denominators.

    The paper's old log-probs are the sampling engine's (old_logprobs=behavior). Not in RLinf, ROLL and SkyRL;
    TRL's off_policy_mask_threshold is the same.
    """

    metrics = {
        "clip_fraction": PpoClip.metrics["clip_fraction"],
        "masked_fraction": "Share of tokens in sequences that are masked.",
    }

    kind: Literal["sequence_mask"] = "sequence_mask"
    """ppo_clip without off-policy sequences of negative advantage."""
    clip_low: NonNegativeFloat = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: NonNegativeFloat = 0.2
    """Ratios above 1 + clip_high are clipped."""
    max_gap: NonNegativeFloat = 0.5
    """Largest mean over a sequence of old minus current log-prob, in nats per token, with which a sequence of
    negative advantage is kept (delta in the paper)."""

    @property
    def reads_sequences(self) -> bool:
        return True

    def per_token(self, tokens: Tokens) -> Surrogate:
        loss, diagnostics = PpoClip(clip_low=self.clip_low, clip_high=self.clip_high).per_token(tokens)
        gap = (tokens.old_logprobs - tokens.logprobs).detach()
        mean = gap if tokens.sequences is None else tokens.sequences.mean(gap)
        is_masked = ((tokens.advantages < 0) & (mean > self.max_gap)).to(loss.dtype)
        return (1.0 - is_masked) * loss, diagnostics | {"masked_fraction": is_masked}
