"""Policy losses: per-token surrogates whose gradient moves the policy.

Owns the formulas and the table of them. Aggregation, corrections for the sampler, the KL term and the entropy bonus are left
to the composition (training/losses.py). A loss is a function of [T] tensors that gives a [T] tensor, to be minimised, and
diagnostics: detached [T] tensors, to be averaged over the mask. `rho` below is `ratio`, sg() a constant, A the advantage as
it was assigned: the weights of the reduction are not in it, so what a loss does with it does not depend on the batch's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from braid.types import Divergence, PolicyLoss

from .recipes import Recipe
from .segments import Segments

LOG_RATIO_BOUND = 20.0
"""Ratios are exact within exp(-20) .. exp(20) = 4.9e8 and constant beyond, so they cannot overflow."""

PerToken = Float[Tensor, "T"]
Surrogate = tuple[PerToken, dict[str, PerToken]]
"""The loss of each token, and diagnostics by name."""


def importance_ratio(
    logprobs: PerToken,
    old_logprobs: PerToken,
    over: Segments | None,
    *,
    is_product: bool = False,
    log_min: float | None = None,
    log_max: float | None = None,
) -> PerToken:
    """How much likelier the policy makes a token, or its turn or sequence, than the old policy did.

        rho_t = exp(d_t)                             d_t = logprobs_t - old_logprobs_t; over None
        rho_t = exp(d_t - sg(d_t) + sg(mean_s d))    s the segment of t

    With `is_product` the sum over s stands in place of the mean: the ratio of the segment's probabilities, whose variance grows
    with its length. The mean is GSPO-token (Zheng et al. 2025, arXiv 2507.18071): all tokens of a segment have its geometric mean ratio,
    and each token keeps a gradient of its own, rho_t grad logprobs_t. Log-ratios are bounded by `log_min` and `log_max`, and
    at +-20 always; within, the value is exact, beyond, the gradient is 0.

    RLinf has token ratios for text (for robots those of an action or a chunk, products), and bounds the log-ratio by clip_log_ratio_min and clip_log_ratio_max alone. ROLL takes the mean over a sequence, or over a turn
    in its agentic pipeline, and lets the gradient through the mean: the same gradient as long as A and the weight are the
    same over the segment. SkyRL: sequences, in this form, bounded at 10 above.
    """
    log_ratio = logprobs - old_logprobs
    if over is not None:
        moved = log_ratio.detach()
        log_ratio = (log_ratio - moved) + (over.sum(moved) if is_product else over.mean(moved))
    low = -LOG_RATIO_BOUND if log_min is None else max(log_min, -LOG_RATIO_BOUND)
    high = LOG_RATIO_BOUND if log_max is None else min(log_max, LOG_RATIO_BOUND)
    return log_ratio.clamp(low, high).exp()


def ppo_clip(
    ratio: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """The clipped surrogate (Schulman et al. 2017, arXiv 1707.06347).

        loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
        loss = min(loss, -dual_clip A)  where A < 0, unless dual_clip is None

    Unequal bounds are DAPO's clip-higher (arXiv 2503.14476). The dual clip, a constant c > 1, bounds the loss of a bad token
    that has become much likelier (Ye et al. 2020, arXiv 1912.09729). Where a bound binds, the gradient is 0.

    Diagnostics: `clip_fraction`, 1 where the clipped term is the larger loss, else 0; `dual_clip_fraction`, likewise (only
    with dual_clip).

    RLinf: the same; its dual clip is 3 unless null. ROLL's dual clip is always 1 + 2 pg_clip. SkyRL: the same, with 3, as a
    loss of its own name.
    """
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    diagnostics = {"clip_fraction": (clipped > unclipped).to(loss.dtype)}
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        diagnostics["dual_clip_fraction"] = (bound < loss).to(loss.dtype)
        loss = loss.clamp(max=bound)
    return loss, diagnostics


def policy_gradient(logprobs: PerToken, advantages: PerToken) -> Surrogate:
    """-A log pi: REINFORCE (Williams 1992). Right for tokens of this very policy only.

    ROLL calls it vanilla; the nearest of RLinf and SkyRL multiply by the ratio to the old policy.
    """
    return -advantages * logprobs, {}


def importance_sampling(ratio: PerToken, advantages: PerToken) -> Surrogate:
    """-rho A: the policy gradient of tokens that the old policy wrote, unbiased and without any clip.

    Its variance grows with the distance of the policies: for few steps per round, or beside corrections. RLinf and ROLL:
    PPO's with bounds that never bind. SkyRL (and Tinker): the same, summed over tokens in place of its reduction.
    """
    return -ratio * advantages, {}


def masked_is(
    ratio: PerToken, logprobs: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float
) -> Surrogate:
    """cispo with tokens left out where it would clip their weight (GLM-5, 2026, after IcePop, arXiv 2510.18855).

        loss = -sg(rho 1[1 - clip_low < rho < 1 + clip_high]) A log pi

    Meant for ratios to the sampler (old_logprobs=behavior). A token that is left out stays in the denominators.

    Diagnostics: `clip_fraction`, 1 where a token is left out. RLinf and ROLL have none. SkyRL: the same, as rollout_is.
    """
    weight = ratio.detach()
    is_inside = ((weight > 1.0 - clip_low) & (weight < 1.0 + clip_high)).to(weight.dtype)
    return -(is_inside * weight * advantages) * logprobs, {"clip_fraction": 1.0 - is_inside}


def cispo(
    ratio: PerToken, logprobs: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float
) -> Surrogate:
    """The gradient of every token, with a bounded weight (MiniMax 2025, arXiv 2506.13585).

        loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi

    Where PPO's clip binds, a token learns nothing; here it learns with the bound as its weight. clip_low = 1 and
    clip_high = 0 make truncated importance sampling, clip(rho, 0, 1), which ROLL calls tis.

    Diagnostics: `clip_fraction`, 1 where the weight is not rho.

    RLinf has none. ROLL: clip(rho, 0.9, 1.1) unless told otherwise, and an option to leave out the tokens that PPO would clip.
    SkyRL: the same, [0, 5].
    """
    weight = ratio.detach()
    clipped = weight.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -(clipped * advantages) * logprobs, {"clip_fraction": (clipped != weight).to(weight.dtype)}


def sapo(ratio: PerToken, advantages: PerToken, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """A smooth gate in place of the clip (Gao et al. 2025, arXiv 2511.20347).

        loss = -A (4 / tau) sigmoid(tau (rho - 1))        tau = tau_positive where A > 0, else tau_negative

    At rho = 1 the gradient is that of the ratio itself; it fades on both sides, the faster the greater tau: at rho = 1 + x to
    4 s (1 - s) of it, with s = sigmoid(tau x). RLinf and ROLL have none. SkyRL: the same.
    """
    tau = _by_sign(advantages, tau_positive, tau_negative)
    return (-4.0 * advantages / tau) * torch.sigmoid(tau * (ratio - 1.0)), {}


def topr(
    ratio: PerToken,
    logprobs: PerToken,
    advantages: PerToken,
    *,
    positive_weight: float,
    negative_weight: float,
) -> Surrogate:
    """Good tokens are imitated as they are, bad ones unlearned as far as they are still likely (Le Roux et al. 2025, arXiv
    2503.14286).

        loss = -positive_weight A log pi                      where A > 0
        loss = -negative_weight sg(min(rho, 1)) A log pi      elsewhere

    Diagnostics: `clip_fraction`, 1 where A < 0 and rho > 1.

    The paper takes the ratio of the whole answer, a product; here it is of a token, or the geometric mean that ratio_level
    asks for, as a product over hundreds of tokens is nearly always 0 or cut off. RLinf and SkyRL have none. ROLL: token
    ratios, and the sign of the answer's reward where braid looks at A, which differs once a baseline is taken off.
    """
    rho = ratio.detach()
    bounded = torch.where(advantages > 0, 1.0, rho.clamp(max=1.0))
    weight = _by_sign(advantages, positive_weight, negative_weight) * bounded
    is_clipped = (advantages < 0) & (rho > 1.0)
    return -(weight * advantages) * logprobs, {"clip_fraction": is_clipped.to(rho.dtype)}


def kimi(logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, *, tau: float) -> Surrogate:
    """A policy gradient without ratio, held to the old policy by a square (Kimi 2025, arXiv 2501.12599, equation 3).

        loss = -A log pi + tau / 2 (log pi - log old)^2

    Beyond a distance of 20 the penalty goes on linearly, so that nothing overflows. The paper's log-probs are of whole
    answers, here of tokens: the penalty of an answer is then a sum of squares in place of the square of a sum.

    Diagnostics: `penalty`. RLinf and SkyRL have none. ROLL: the same, as pg_variant kimi15; its tau is always 0.1.
    """
    penalty = tau * torch.nn.functional.huber_loss(
        logprobs, old_logprobs, reduction="none", delta=LOG_RATIO_BOUND
    )
    return penalty - advantages * logprobs, {"penalty": penalty.detach()}


def clip_cov(
    ratio: PerToken, advantages: PerToken, is_chosen: PerToken, *, clip_low: float, clip_high: float
) -> Surrogate:
    """PPO's clip, with a few tokens left out that would take much of the entropy (Cui et al. 2025, arXiv 2505.22617).

        loss = (1 - is_chosen) ppo_clip(rho, A)

    `is_chosen` is 1 at the tokens that covariance.choose_within picked for the step, else 0.

    Diagnostics: those of ppo_clip, and `chosen_fraction`.

    The paper chooses by the current log-probs, among tokens that PPO does not clip; braid before the step, so that the cut
    into micro-batches plays no part, and a chosen token may be one that is clipped as well. SkyRL chooses at random in every
    micro-batch, by covariances of advantages that its reduction has divided by the number of tokens, so that next to none
    reaches the lower bound. RLinf and ROLL have none.
    """
    loss, diagnostics = ppo_clip(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    return loss * (1.0 - is_chosen), diagnostics | {"chosen_fraction": is_chosen}


def kl_cov(
    ratio: PerToken,
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    is_chosen: PerToken,
    *,
    coef: float,
) -> Surrogate:
    """No clip, but a penalty on the tokens that would take most of the entropy (Cui et al. 2025, arXiv 2505.22617).

        loss = -rho A + coef is_chosen |log pi - log old|

    `is_chosen` is 1 at the tokens that covariance.choose_greatest picked for the step, else 0. On the first step after the
    old log-probs were taken the penalty is 0, and so is its gradient. Diagnostics: `chosen_fraction`.

    Chosen before the step; see clip_cov. SkyRL chooses within a micro-batch, and does not divide the penalty by the number
    of tokens as it does the rest of the loss. RLinf and ROLL have none.
    """
    penalty = (coef * is_chosen) * (logprobs - old_logprobs).abs()
    return penalty - ratio * advantages, {"chosen_fraction": is_chosen}


def dppo(
    ratio: PerToken,
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    divergence: Divergence,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """A trust region in the token's probability, not in its ratio (Qi et al. 2026, arXiv 2602.04879, binary divergences).

        loss = -rho A, 0 where A pushes a token further out of the region:
               A > 0, p > q and D > clip_high;  or A < 0, p < q and D > clip_low
        tv     D = |p - q|                                           p = exp(logprobs), q = exp(old_logprobs)
        kl     D = q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))

    So a rare token may change by a large factor, and a likely one only by little. Diagnostics: `clip_fraction`, 1 where the
    loss was set to 0.

    q is the paper's sampler when old_logprobs=behavior; otherwise the policy before the update. RLinf and ROLL have none.
    SkyRL: the same, against the sampler.
    """
    new, old = logprobs.detach(), old_logprobs.detach()
    if divergence == "tv":
        rise = new.exp() - old.exp()
        is_outside = ((advantages > 0) & (rise > clip_high)) | ((advantages < 0) & (rise < -clip_low))
    else:
        rest_new, rest_old = ((-x.expm1()).clamp(min=torch.finfo(x.dtype).tiny) for x in (new, old))
        moved = old.exp() * (old - new) + rest_old * (rest_old / rest_new).log()
        is_outside = ((advantages > 0) & (new > old) & (moved > clip_high)) | (
            (advantages < 0) & (new < old) & (moved > clip_low)
        )
    is_inside = (~is_outside).to(ratio.dtype)
    return -(is_inside * advantages) * ratio, {"clip_fraction": is_outside.to(ratio.dtype)}


def cross_entropy(logprobs: PerToken) -> Surrogate:
    """-log pi: imitation of every token, whatever its advantage. What is not to be imitated has to be filtered out first.

    RLinf and ROLL have it in their supervised training only. SkyRL: the same, for recorded answers.
    """
    return -logprobs, {}


def _by_sign(advantages: Tensor, positive: float, otherwise: float) -> Tensor:
    """One number where A > 0 and another elsewhere, in the dtype of A."""
    return torch.where(advantages > 0, advantages.new_full((), positive), otherwise)


@dataclass(frozen=True, slots=True)
class Tokens:
    """All that a policy loss may look at, each [T]. `is_chosen` is 0 unless the loss acts on chosen tokens."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    ratio: Tensor
    is_chosen: Tensor


POLICY_LOSSES: Mapping[PolicyLoss, Callable[[Recipe, Tokens], Surrogate]] = {
    "ppo_clip": lambda r, t: ppo_clip(
        t.ratio, t.advantages, clip_low=r.clip_low, clip_high=r.clip_high, dual_clip=r.dual_clip
    ),
    "policy_gradient": lambda _, t: policy_gradient(t.logprobs, t.advantages),
    "importance_sampling": lambda _, t: importance_sampling(t.ratio, t.advantages),
    "masked_is": lambda r, t: masked_is(
        t.ratio, t.logprobs, t.advantages, clip_low=r.clip_low, clip_high=r.clip_high
    ),
    "kimi": lambda r, t: kimi(t.logprobs, t.old_logprobs, t.advantages, tau=r.kimi_tau),
    "cispo": lambda r, t: cispo(
        t.ratio, t.logprobs, t.advantages, clip_low=r.clip_low, clip_high=r.clip_high
    ),
    "sapo": lambda r, t: sapo(
        t.ratio, t.advantages, tau_positive=r.sapo_tau_positive, tau_negative=r.sapo_tau_negative
    ),
    "topr": lambda r, t: topr(
        t.ratio,
        t.logprobs,
        t.advantages,
        positive_weight=r.topr_positive_weight,
        negative_weight=r.topr_negative_weight,
    ),
    "clip_cov": lambda r, t: clip_cov(
        t.ratio, t.advantages, t.is_chosen, clip_low=r.clip_low, clip_high=r.clip_high
    ),
    "kl_cov": lambda r, t: kl_cov(
        t.ratio, t.logprobs, t.old_logprobs, t.advantages, t.is_chosen, coef=r.cov_coef
    ),
    "dppo": lambda r, t: dppo(
        t.ratio,
        t.logprobs,
        t.old_logprobs,
        t.advantages,
        divergence=r.dppo_divergence,
        clip_low=r.clip_low,
        clip_high=r.clip_high,
    ),
    "cross_entropy": lambda _, t: cross_entropy(t.logprobs),
}
"""Every policy loss by name. What each reads of a recipe is recipes.POLICY_LOSS_KEYS."""
