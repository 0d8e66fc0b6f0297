"""What policy losses read and return: tokens with their importance ratio, and a surrogate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .segments import Segments

LOG_RATIO_BOUND = 20.0
"""Ratios are exact within exp(-20) .. exp(20) = 4.9e8 and constant beyond, so they cannot overflow."""

PerToken = Float[Tensor, "T"]
Surrogate = tuple[PerToken, dict[str, PerToken]]
"""Per-token loss to be minimised, and diagnostics by name: detached [T] tensors, to be averaged over the
mask."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of a policy loss, each [T]. With algorithm.logprob_level above token, log-probs are those of
    decisions, repeated at each of their tokens. `advantages` are those before the weights of the reduction
    are applied. `is_chosen` is 1 at the tokens that a loss with `selects_tokens` selected for the step, else
    0. `sequences` are the trajectories of the tokens, for a loss with `reads_sequences`."""

    logprobs: PerToken
    old_logprobs: PerToken
    advantages: PerToken
    ratio: PerToken
    is_chosen: PerToken
    sequences: Segments | None = None


def importance_ratio(
    logprobs: PerToken,
    old_logprobs: PerToken,
    over: Segments | None,
    *,
    is_product: bool = False,
    log_min: float | None = None,
    log_max: float | None = None,
) -> PerToken:
    """Importance ratio of the policy to the old policy, of a token or of its turn or sequence.

        rho_t = exp(d_t)                             d_t = logprobs_t - old_logprobs_t; over None
        rho_t = exp(d_t - sg(d_t) + sg(mean_s d))    s the segment of t

    With `is_product`, the mean over s is replaced by the sum: the ratio of the segment's probabilities, whose
    variance grows with its length. The mean is GSPO-token (Zheng et al. 2025, arXiv 2507.18071): all tokens
    of a segment have its geometric mean ratio, and each token has its own gradient, rho_t grad logprobs_t.
    Log-ratios are clamped to `log_min` and `log_max`, and always to +-20; beyond the bounds the gradient is
    0.

    RLinf has token ratios for text (for robots, products over an action or a chunk), and bounds the log-ratio
    only by clip_log_ratio_min and clip_log_ratio_max. ROLL uses the mean over a sequence, or over a turn in
    its agentic pipeline, and backpropagates through the mean: the same gradient if A and the weight are
    constant over the segment. SkyRL: sequences, in this form, with an upper bound of 10.
    """
    log_ratio = logprobs - old_logprobs
    if over is not None:
        moved = log_ratio.detach()
        log_ratio = (log_ratio - moved) + (over.sum(moved) if is_product else over.mean(moved))
    low = -LOG_RATIO_BOUND if log_min is None else max(log_min, -LOG_RATIO_BOUND)
    high = LOG_RATIO_BOUND if log_max is None else min(log_max, LOG_RATIO_BOUND)
    return log_ratio.clamp(low, high).exp()


def by_sign(advantages: Tensor, positive: float, otherwise: float) -> Tensor:
    """`positive` where A > 0, else `otherwise`, in the dtype of A."""
    return torch.where(advantages > 0, advantages.new_full((), positive), otherwise)
