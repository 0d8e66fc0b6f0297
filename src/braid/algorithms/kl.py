"""KL divergence from the reference policy, estimated per token from the log-probs of sampled tokens.

Owns the estimators. Whether one enters the loss or the reward is the composition's choice (`Recipe.kl_in`), and it matters:
an estimator of the right value need not have the right gradient.

With x sampled from pi, d = log pi(x) - log ref(x), S(x) = grad log pi(x), and pi the policy now (not an older one):

    estimator   value            E[value]            in the loss: E[grad value]         in the reward: E[sg(value) S]
    k1          d                KL(pi|ref)          0: noise, no pull at all           grad KL(pi|ref)
    k2          d^2 / 2          KL(pi|ref) + O(d^3) grad KL(pi|ref)                    E[d^2 S] / 2: no divergence's
    k3          exp(-d) - 1 + d  KL(pi|ref)          grad KL(ref|pi)                    grad (KL(pi|ref) - KL(ref|pi))
    abs         |d|              not KL              grad sum_x |pi(x) - ref(x)|        E[|d| S]: no divergence's

So the pair that regularises by KL(pi|ref) is k2 in the loss or k1 in the reward. k3 in the loss is the published GRPO: it
pulls by the *forward* KL, which agrees with the reverse one to first order in d. In the reward k3's pull cancels to first
order. tests/learning/test_exact_gradients.py shows each entry by enumeration.

A loss term acts on its own token only; a reward term is credited to all tokens before it, so over a sequence only the latter
is the gradient of the sequence's KL (Tang & Munos 2025, section 4).

Sources: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html) for k1, k2, k3 as values;
Tang & Munos 2025 (arXiv 2506.09477) and Liu et al. 2025 (arXiv 2510.01555) for the gradients.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from braid.types import KlEstimator

MAX_EXPONENT = 20.0
"""k3's exponent is bounded here, with or without a clamp: exp(20) is 4.9e8, where float32 still counts."""


def kl_estimate(
    logprobs: Float[Tensor, "T"],
    ref_logprobs: Float[Tensor, "T"],
    *,
    estimator: KlEstimator,
    clamp: float | None,
) -> Float[Tensor, "T"]:
    """The estimator's value in nats at each position, of KL(policy | reference). Formulas and gradients: module docstring.

    `clamp` bounds the absolute value; where it binds, the gradient is 0. k3 is exact up to ref_logprobs - logprobs = 20 and
    constant beyond, so neither value nor gradient overflows.

    RLinf, ROLL and SkyRL clamp k3 (only) to [-10, 10], always. RLinf's FSDP actor passes the two log-probs the other way
    round, which estimates another divergence; SkyRL's reference ignores the temperature. Both arguments here are of the
    sampling distribution, current policy first.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        kl = difference
    elif estimator == "k2":
        kl = 0.5 * difference.square()
    elif estimator == "k3":
        # expm1 keeps the digits that exp(-d) - 1 loses near d = 0, where most tokens are.
        exponent = (-difference).clamp(max=MAX_EXPONENT)
        kl = exponent.expm1() - exponent
    else:
        kl = difference.abs()
    return kl if clamp is None else kl.clamp(-clamp, clamp)
