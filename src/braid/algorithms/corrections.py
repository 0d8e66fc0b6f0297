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

from braid.types import CorrectionLevel, CorrectionMode

from .segments import Segments

LOG_WEIGHT_BOUND = 20.0
"""Weights are exact within exp(-20) .. exp(20) and constant beyond, so that products over long sequences stay finite."""


def sampling_weight(
    old_logprobs: Float[Tensor, "T"],
    behavior_logprobs: Float[Tensor, "T"],
    over: Segments | None,
    *,
    level: CorrectionLevel,
) -> Float[Tensor, "T"]:
    """How much likelier the old policy makes what was sampled than the sampler did; a constant, without gradient.

        token        w_t = exp(d_t)               d_t = old_logprobs_t - behavior_logprobs_t
        turn         w_t = exp(sum_s d)           s the turn of t
        sequence     w_t = exp(sum_s d)           s the sequence of t
        geometric    w_t = exp(mean_s d)          s the sequence of t; turn_geometric: its turn

    `over` are the turns or the sequences of the batch; None for token. Tokens are the usual choice: exact for one-token
    answers, biased but of low variance beyond. The product over the sequence is unbiased, with a variance that grows with
    its length. The geometric mean compares sequences of any length; it is a measure more than a weight.

    RLinf: token. ROLL: token, geometric mean over a turn or a sequence, product over a sequence. SkyRL: token and product
    over a sequence as weights, geometric mean and product for masking.
    """
    difference = (old_logprobs - behavior_logprobs).detach()
    if level != "token":
        assert over is not None, f"the weight of a {level} needs its segments"
        difference = over.mean(difference) if level.endswith("geometric") else over.sum(difference)
    return difference.clamp(-LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND).exp()


def correction_factor(
    weight: Float[Tensor, "T"], *, mode: CorrectionMode, low: float, high: float
) -> tuple[Float[Tensor, "T"], Bool[Tensor, "T"]]:
    """What the loss is multiplied by, and where the bounds bind.

        truncate     clip(w, low, high)
        mask         1 where low <= w <= high, else 0

    To weigh and mask, as decoupled PPO does, name both. RLinf truncates from above (its release v0.1 from below, by mistake),
    and masks above in decoupled PPO. ROLL: both, but its token mean does not apply the masks. SkyRL: both, each with bounds
    of its own.
    """
    is_outside = (weight < low) | (weight > high)
    factor = weight.clamp(low, high) if mode == "truncate" else (~is_outside).to(weight.dtype)
    return factor, is_outside
