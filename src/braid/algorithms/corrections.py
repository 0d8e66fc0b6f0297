"""Corrections for tokens that another distribution sampled than the one that is trained.

The engine that samples has other kernels and precision than the trainer, and may hold older weights, so it draws from mu
where the policy before the update is pi_old. Multiplying a token's loss by w = pi_old / mu makes the expectation that of
pi_old again (importance sampling); bounding w, or leaving out what lies beyond the bounds, trades a little bias for much
less variance. With a ratio pi / pi_old that is clipped on its own, this is decoupled PPO (Hilton et al. 2021, arXiv
2110.00641).

Owns the factor. The composition multiplies the surrogate with it, and the surrogate alone: KL, entropy and supervised terms
keep all their tokens. A token that is masked keeps its place in every denominator, so that the weight of the others does not
depend on how many were masked.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from braid.types import CorrectionLevel, CorrectionMeasure, CorrectionMode

from .segments import Segments

LOG_WEIGHT_BOUND = 20.0
"""Weights are exact within exp(-20) .. exp(20) and constant beyond, so that products over long sequences stay finite."""


def sampling_weight(
    old_logprobs: Float[Tensor, "T"],
    behavior_logprobs: Float[Tensor, "T"],
    over: Segments | None,
    *,
    level: CorrectionLevel,
    measure: CorrectionMeasure = "ratio",
) -> Float[Tensor, "T"]:
    """How much likelier the old policy makes what was sampled than the sampler did; a constant, without gradient.

        token        w_t = exp(d_t)               d_t = old_logprobs_t - behavior_logprobs_t
        turn         w_t = exp(sum_s d)           s the turn of t
        sequence     w_t = exp(sum_s d)           s the sequence of t
        geometric    w_t = exp(mean_s d)          s the sequence of t; turn_geometric: its turn

    measure=difference: d_t = exp(old_logprobs_t) - exp(behavior_logprobs_t), and w is d_t, its sum or its mean over s,
    without the exponential: a distance for masks, no weight.

    `over` are the turns or the sequences of the batch; None for token. Positions that its mask leaves out take no part: over
    segments of nothing a ratio is 1 and a difference 0. Tokens are the usual choice: exact for one-token
    answers, biased but of low variance beyond. The product over the sequence is unbiased, with a variance that grows with
    its length. The geometric mean compares sequences of any length; it is a measure more than a weight.

    RLinf: token. ROLL: token, geometric mean over a turn or a sequence, product over a sequence, each over all tokens of the
    answer; differences likewise. SkyRL: token and product over a sequence as weights, geometric mean and product for
    masking, over the tokens that its token masks kept.
    """
    if measure == "difference":
        difference = (old_logprobs.exp() - behavior_logprobs.exp()).detach()
    else:
        difference = (old_logprobs - behavior_logprobs).detach()
    if level != "token":
        assert over is not None, f"the weight of a {level} needs its segments"
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
    """The factor that multiplies the loss, and where the bounds bind. `high` None is no upper bound.

        truncate         clip(w, low, high)
        mask             1 where low <= w <= high, else 0
        mask_sequence    1 where that holds for all tokens of the sequence (`sequences`), else 0

    To weigh and mask, as decoupled PPO does, name both. RLinf truncates from above (its release v0.1 from below, by mistake);
    its decoupled PPO weighs without a bound, and takes tokens above behave_weight_threshold out of the denominator too. ROLL:
    truncate and mask, but its token mean does not apply the masks. SkyRL: all three, each with bounds of its own.
    """
    is_outside = weight < low
    if high is not None:
        is_outside = is_outside | (weight > high)
    if mode == "mask_sequence":
        assert sequences is not None, "a mask of sequences needs the sequences"
        is_outside = sequences.any(is_outside)
    factor = weight.clamp(low, high) if mode == "truncate" else (~is_outside).to(weight.dtype)
    return factor, is_outside
