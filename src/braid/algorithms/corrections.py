"""Off-policy corrections for the mismatch between the sampling engine and the trained policy.

The engine differs from the trainer in kernels and precision, and may have older weights, so it samples from
mu while the policy before the update is pi_old. Multiplying a token's loss by w = pi_old / mu restores the
expectation under pi_old (importance sampling); bounding w, or masking tokens whose w is out of bounds, trades
a little bias for much less variance. With a separately clipped ratio pi / pi_old, this is decoupled PPO
(Hilton et al. 2021, arXiv 2110.00641).

Owns the factor, and the interpolation of log-probs. The caller (training/losses.py) multiplies only the
surrogate by it: KL, entropy and supervised terms keep all their tokens. Masked tokens still count in every
denominator, so the weight of the other tokens does not depend on how many were masked.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from braid.types import CorrectionLevel, CorrectionMeasure, CorrectionMode

from .segments import Segments

LOG_WEIGHT_BOUND = 20.0
"""Weights are exact within exp(-20) .. exp(20) and constant beyond, so products over long sequences stay
finite."""


def proximal_logprobs(
    logprobs: Float[Tensor, "T"],
    behavior_logprobs: Float[Tensor, "T"],
    versions: Float[Tensor, "T"],
    *,
    version: int,
) -> Float[Tensor, "T"]:
    """Log-probs of the policy before the update, interpolated instead of recomputed; without gradient.

        log prox = log mu + a (log pi - log mu)        a = (v - 1 - v_mu) / (v - v_mu), at least 0

    Token by token, v_mu = `versions` is the version that sampled it, v = `version` the one that is being
    trained, and v - 1 the one before the update: a token n versions old has a = n / (n + 1). Where the
    sampling version is v - 1, as it is for every token of a synchronous run, a = 0 and prox is mu; so it is,
    by definition, for v_mu = v, where a is 0 / 0.

    RLinf: the same, in decoupled_actor_critic without recompute_logprobs. Not in ROLL and SkyRL.
    """
    lag = (version - 1 - versions).clamp(min=0)
    return (behavior_logprobs + lag / (lag + 1) * (logprobs - behavior_logprobs)).detach()


def sampling_weight(
    old_logprobs: Float[Tensor, "T"],
    behavior_logprobs: Float[Tensor, "T"],
    over: Segments | None,
    *,
    level: CorrectionLevel,
    measure: CorrectionMeasure = "ratio",
) -> Float[Tensor, "T"]:
    """The importance weight of the old policy relative to the sampling engine, without gradient.

        token        w_t = exp(d_t)               d_t = old_logprobs_t - behavior_logprobs_t
        turn         w_t = exp(sum_s d)           s the turn of t
        sequence     w_t = exp(sum_s d)           s the sequence of t
        geometric    w_t = exp(mean_s d)          s the sequence of t; turn_geometric: its turn

    measure=difference: d_t = exp(old_logprobs_t) - exp(behavior_logprobs_t), and w is d_t, or its sum or mean
    over s, without the exponential: a distance for masks, not a weight.

    `over` holds the turns or sequences of the batch; None for token. Positions outside its mask are ignored:
    over an empty segment the ratio is 1 and the difference 0. Token level is the usual choice: exact for
    one-token responses, biased but of low variance for longer ones. The product over the sequence is
    unbiased, with a variance that grows with its length. The geometric mean is comparable across sequence
    lengths; it is a measure rather than a weight.

    RLinf: token. ROLL: token, geometric mean over a turn or a sequence, product over a sequence, each over
    all tokens of the response; differences likewise. SkyRL: token and product over a sequence as weights,
    geometric mean and product for masking, over the tokens kept by its token masks.
    """
    if measure == "difference":
        difference = (old_logprobs.exp() - behavior_logprobs.exp()).detach()
    else:
        difference = (old_logprobs - behavior_logprobs).detach()
    if level != "token":
        if over is None:
            raise ValueError(f"level={level} needs `over`, the segments that share a ratio")
        difference = over.mean(difference) if level.endswith("geometric") else over.sum(difference)
    if measure == "difference":
        return difference
    return difference.clamp(-LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND).exp()


def correction_factor(
    weight: Float[Tensor, "T"],
    *,
    mode: CorrectionMode,
    low: float,
    high: float | None,
    sequences: Segments | None = None,
) -> tuple[Float[Tensor, "T"], Bool[Tensor, "T"]]:
    """The factor that multiplies the loss, and a mask of the positions that the bounds affect.

        truncate         clip(w, low, high)
        mask             1 where low <= w <= high, else 0
        mask_sequence    1 where that holds for all tokens of the sequence (`sequences`), else 0

    `high=None` means no upper bound.

    To both weigh and mask, as in decoupled PPO, use two corrections. RLinf truncates from above (release v0.1
    from below, by mistake); its decoupled PPO weighs without a bound and also removes tokens above
    behave_weight_threshold from the denominator. ROLL: truncate and mask, but its token mean does not apply
    the masks. SkyRL: all three, each with separate bounds.
    """
    is_outside = weight < low
    if high is not None:
        is_outside = is_outside | (weight > high)
    if mode == "mask_sequence":
        if sequences is None:
            raise ValueError("mode=mask_sequence needs `sequences`, the rows' segments")
        is_outside = sequences.any(is_outside)
    factor = weight.clamp(low, high) if mode == "truncate" else (~is_outside).to(weight.dtype)
    return factor, is_outside
