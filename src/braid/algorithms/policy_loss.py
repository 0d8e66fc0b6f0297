"""Policy losses: per-token surrogate objectives.

Owns the formulas; recipes.py has the table of names. Aggregation, off-policy corrections, the KL term and the entropy bonus are
left to training/losses.py. A loss maps [T] tensors to a [T] tensor, to be minimised, and diagnostics:
detached [T] tensors, to be averaged over the mask. `rho` below is `ratio`, sg() the stop-gradient, A the
advantage before the weights of the reduction are applied, so that no loss depends on the size of the batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from braid.types import Divergence

from .recipes import Recipe
from .segments import Segments

LOG_RATIO_BOUND = 20.0
"""Ratios are exact within exp(-20) .. exp(20) = 4.9e8 and constant beyond, so they cannot overflow."""

PerToken = Float[Tensor, "T"]
Surrogate = tuple[PerToken, dict[str, PerToken]]
"""Per-token loss, and diagnostics by name."""


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


def ppo_clip(
    ratio: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """The clipped surrogate (Schulman et al. 2017, arXiv 1707.06347).

        loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
        loss = min(loss, -dual_clip A)  where A < 0, unless dual_clip is None

    Unequal bounds are DAPO's clip-higher (arXiv 2503.14476). The dual clip, a constant > 1, bounds the loss
    of a token with a negative advantage whose probability has grown a lot (Ye et al. 2020, arXiv 1912.09729).
    Where a bound binds, the gradient is 0.

    Diagnostics: `clip_fraction`, 1 where the clipped term is the larger loss, else 0; `dual_clip_fraction`,
    likewise (only with dual_clip).

    RLinf: the same; its dual clip is 3 unless null. ROLL's dual clip is always 1 + 2 pg_clip. SkyRL: the
    same, with 3, as a separate loss.
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
    """-A log pi: REINFORCE (Williams 1992). Correct only for tokens sampled from the current policy.

    ROLL calls it vanilla; the closest losses of RLinf and SkyRL multiply by the ratio to the old policy.
    """
    return -advantages * logprobs, {}


def importance_sampling(ratio: PerToken, advantages: PerToken) -> Surrogate:
    """-rho A: the unbiased, unclipped policy gradient for tokens sampled from the old policy.

    Its variance grows with the distance between the policies, so use it with few steps per round, or with
    corrections. RLinf and ROLL: PPO with bounds that never bind. SkyRL (and Tinker): the same, but summed
    over tokens, ignoring the configured reduction.
    """
    return -ratio * advantages, {}


def masked_is(
    ratio: PerToken, logprobs: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float
) -> Surrogate:
    """cispo that masks tokens instead of clipping their weight (GLM-5, 2026, after IcePop, arXiv 2510.18855).

        loss = -sg(rho 1[1 - clip_low < rho < 1 + clip_high]) A log pi

    Meant for ratios to the sampling engine (old_logprobs=behavior). Masked tokens still count in the
    denominators.

    Diagnostics: `clip_fraction`, 1 where a token is masked. Not in RLinf and ROLL. SkyRL: the same, as
    rollout_is.
    """
    weight = ratio.detach()
    is_inside = ((weight > 1.0 - clip_low) & (weight < 1.0 + clip_high)).to(weight.dtype)
    return -(is_inside * weight * advantages) * logprobs, {"clip_fraction": 1.0 - is_inside}


def cispo(
    ratio: PerToken,
    logprobs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float,
    clip_high: float,
    cispo_mask: bool = False,
) -> Surrogate:
    """Policy gradient of every token, with a clipped importance weight (MiniMax 2025, arXiv 2506.13585).

        loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi

    Where PPO's clip binds, a token has no gradient; here it has one, weighted by the bound. clip_low = 1 and
    clip_high = 0 give truncated importance sampling, clip(rho, 0, 1), which ROLL calls tis. With `cispo_mask` the
    loss is 0 at the tokens that PPO would clip (the paper's unified formulation, eq. 6 and 7):

        A > 0 and rho > 1 + clip_high, or A < 0 and rho < 1 - clip_low

    Diagnostics: `clip_fraction`, 1 where the weight is not rho.

    Not in RLinf. ROLL: bounds of 0.1, which its files cannot change; nor can they set its mask. SkyRL: the same
    without mask, [0, 5].
    """
    weight = ratio.detach()
    clipped = weight.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = clipped != weight
    if cispo_mask:
        clipped = torch.where(is_clipped & ((advantages > 0) == (weight > 1.0)), 0.0, clipped)
    return -(clipped * advantages) * logprobs, {"clip_fraction": is_clipped.to(weight.dtype)}


def sapo(
    ratio: PerToken, advantages: PerToken, *, sapo_tau_positive: float, sapo_tau_negative: float
) -> Surrogate:
    """Soft gate in place of the clip (Gao et al. 2025, arXiv 2511.20347).

        loss = -A (4 / tau) sigmoid(tau (rho - 1))        tau = sapo_tau_positive where A > 0, else sapo_tau_negative

    At rho = 1 the gradient is that of the ratio itself. It decays on both sides, faster for a larger tau: at
    rho = 1 + x by the factor 4 s (1 - s), with s = sigmoid(tau x). Not in RLinf and ROLL. SkyRL: the same.
    """
    tau = _by_sign(advantages, sapo_tau_positive, sapo_tau_negative)
    return (-4.0 * advantages / tau) * torch.sigmoid(tau * (ratio - 1.0)), {}


def topr(
    ratio: PerToken,
    logprobs: PerToken,
    advantages: PerToken,
    *,
    topr_positive_weight: float,
    topr_negative_weight: float,
) -> Surrogate:
    """Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286).

        loss = -topr_positive_weight A log pi                      where A > 0
        loss = -topr_negative_weight sg(min(rho, 1)) A log pi      elsewhere

    Diagnostics: `clip_fraction`, 1 where A < 0 and rho > 1.

    Tokens with a positive advantage are imitated without importance weight; the others have a truncated one.
    The paper uses the ratio of the whole response, a product; here it is the ratio of a token, or the
    geometric mean set by ratio_level, because a product over hundreds of tokens is nearly always 0 or
    truncated. Not in RLinf and SkyRL. ROLL: token ratios, and the sign of the response's reward instead of A,
    which differs if a baseline is subtracted.
    """
    rho = ratio.detach()
    bounded = torch.where(advantages > 0, 1.0, rho.clamp(max=1.0))
    weight = _by_sign(advantages, topr_positive_weight, topr_negative_weight) * bounded
    is_clipped = (advantages < 0) & (rho > 1.0)
    return -(weight * advantages) * logprobs, {"clip_fraction": is_clipped.to(rho.dtype)}


def kimi(logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, *, kimi_tau: float) -> Surrogate:
    """Policy gradient without ratio, with a squared penalty towards the old policy (Kimi 2025, arXiv
    2501.12599, eq. 3).

        loss = -A log pi + kimi_tau / 2 (log pi - log old)^2

    Beyond a distance of 20 the penalty grows linearly, to avoid overflow. Log-probs are per token, in the
    paper per response, so the penalty of a response is a sum of squares instead of the square of a sum.

    Diagnostics: `penalty`. Not in RLinf and SkyRL. ROLL: the same, as pg_variant kimi15; its tau is always
    0.1.
    """
    penalty = kimi_tau * torch.nn.functional.huber_loss(
        logprobs, old_logprobs, reduction="none", delta=LOG_RATIO_BOUND
    )
    return penalty - advantages * logprobs, {"penalty": penalty.detach()}


def clip_cov(
    ratio: PerToken, advantages: PerToken, is_chosen: PerToken, *, clip_low: float, clip_high: float
) -> Surrogate:
    """ppo_clip without a few tokens that would reduce entropy most (Cui et al. 2025, arXiv 2505.22617).

        loss = (1 - is_chosen) ppo_clip(rho, A)

    `is_chosen` is 1 at the tokens that covariance.choose_within selected for the step, else 0.

    Diagnostics: those of ppo_clip, and `chosen_fraction`.

    The paper selects by the current log-probs, among tokens that PPO does not clip. braid selects before the
    step, so the result does not depend on micro-batches, and a selected token may also be a clipped one.
    SkyRL selects at random in every micro-batch, by covariances of advantages that its reduction has already
    divided by the number of tokens, so almost none reaches the lower bound. Not in RLinf and ROLL.
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
    cov_coef: float,
) -> Surrogate:
    """No clip, but a penalty on the tokens that would reduce entropy most (Cui et al. 2025, arXiv
    2505.22617).

        loss = -rho A + cov_coef is_chosen |log pi - log old|

    `is_chosen` is 1 at the tokens that covariance.choose_greatest selected for the step, else 0. On the first
    step after the old log-probs were computed, the penalty and its gradient are 0. Diagnostics:
    `chosen_fraction`.

    Tokens are selected before the step; see clip_cov. SkyRL selects within a micro-batch, and does not divide
    the penalty by the number of tokens, as it does the rest of the loss. Not in RLinf and ROLL.
    """
    penalty = (cov_coef * is_chosen) * (logprobs - old_logprobs).abs()
    return penalty - ratio * advantages, {"chosen_fraction": is_chosen}


def dppo(
    ratio: PerToken,
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    dppo_divergence: Divergence,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Trust region on the token's probability instead of its ratio (Qi et al. 2026, arXiv 2602.04879, binary
    divergences).

        loss = -rho A, but 0 where A pushes a token further out of the trust region:
               A > 0, p > q and D > clip_high;  or A < 0, p < q and D > clip_low
        tv     D = |p - q|                                           p = exp(logprobs), q = exp(old_logprobs)
        kl     D = q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))

    A rare token may thus change by a large factor, a likely one only by a small one. Diagnostics:
    `clip_fraction`, 1 where the loss is set to 0.

    q is the sampling engine's probability, as in the paper, if old_logprobs=behavior; otherwise that of the
    policy before the update. Not in RLinf and ROLL. SkyRL: the same, with the sampling engine's.
    """
    new, old = logprobs.detach(), old_logprobs.detach()
    if dppo_divergence == "tv":
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
    """-log pi: imitation of every token, whatever its advantage. Tokens not to be imitated must be masked
    beforehand.

    RLinf and ROLL: only in supervised training. SkyRL: the same, for recorded responses.
    """
    return -logprobs, {}


def _by_sign(advantages: Tensor, positive: float, otherwise: float) -> Tensor:
    """`positive` where A > 0, else `otherwise`, in the dtype of A."""
    return torch.where(advantages > 0, advantages.new_full((), positive), otherwise)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of a policy loss, each [T]. `is_chosen` is 0 unless the loss is in recipes.CHOOSING_LOSSES."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    ratio: Tensor
    is_chosen: Tensor


def surrogate(recipe: Recipe, tokens: Tokens) -> Surrogate:
    """The recipe's policy loss: the function of that name, called with the fields of `tokens` that its parameters name
    and the fields of the recipe that its keyword-only parameters name."""
    loss: Callable[..., Surrogate] = globals()[recipe.policy_loss]
    return loss(**{name: getattr(recipe if is_set else tokens, name) for name, is_set in _parameters(loss)})


@functools.cache
def _parameters(loss: Callable[..., Surrogate]) -> list[tuple[str, bool]]:
    """A loss's parameters, and whether each is keyword-only."""
    return [(name, p.kind is p.KEYWORD_ONLY) for name, p in inspect.signature(loss).parameters.items()]
