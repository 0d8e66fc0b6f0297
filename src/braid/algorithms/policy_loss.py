"""Policy losses: per-token surrogates whose gradient moves the policy.

Owns the formulas. Aggregation, the KL term and the entropy bonus are left to the composition. A loss is a
function of [T] tensors that gives a [T] tensor, to be minimised; diagnostics are detached [T] tensors, to be
averaged over the mask.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Ratios are exact within exp(-20) .. exp(20) = 4.9e8 and constant beyond, so they cannot overflow."""


def ppo_clip(
    logprobs: Float[Tensor, "T"],
    old_logprobs: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Float[Tensor, "T"], dict[str, Float[Tensor, "T"]]]:
    """The clipped surrogate (Schulman et al. 2017, arXiv 1707.06347), per token, and its diagnostics.

        rho  = exp(logprobs - old_logprobs)
        loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
        loss = min(loss, -dual_clip A)  where A < 0, unless dual_clip is None

    Unequal bounds are DAPO's clip-higher (arXiv 2503.14476). The dual clip, a constant c > 1, bounds the loss
    of a bad token that has become much likelier (Ye et al. 2020, arXiv 1912.09729). Where a bound binds, the
    gradient is 0. The log-ratio is bounded at +-20; within, the value is exact.

    Diagnostics: `ratio`; `clip_fraction`, 1 where the clipped term is the larger loss, else 0;
    `dual_clip_fraction`, likewise (only with dual_clip); `approx_kl`, k3 of the move from the old policy to
    this one, in nats.

    RLinf bounds the log-ratio only when told to, and its dual clip is 3 unless null. ROLL's dual clip is
    always 1 + 2 pg_clip. SkyRL: the same, with 3, as a loss of its own name.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    diagnostics = {
        "ratio": ratio.detach(),
        "clip_fraction": (clipped > unclipped).to(loss.dtype),
        "approx_kl": (log_ratio.expm1() - log_ratio).detach(),
    }
    if dual_clip is not None:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        diagnostics["dual_clip_fraction"] = (bound < loss).to(loss.dtype)
        loss = torch.minimum(loss, bound)
    return loss, diagnostics


def policy_gradient(logprobs: Float[Tensor, "T"], advantages: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """-A log pi, per token: REINFORCE (Williams 1992). Right for tokens of this very policy only.

    ROLL calls it vanilla; the nearest of RLinf and SkyRL multiply by the ratio to the old policy.
    """
    return -advantages * logprobs
