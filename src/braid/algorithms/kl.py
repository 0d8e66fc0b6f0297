"""KL divergence from the reference policy, estimated per token from the log-probs of sampled tokens.

Owns the estimators, except for those whose names start with `full`, which models.logprobs computes from all
logits. `Recipe.kl_in` decides whether the estimate enters the loss or the reward, and it matters: an unbiased
estimator of the value need not have the right gradient. With x sampled from the current policy pi, d = log
pi(x) - log ref(x), S = grad log pi(x), and sg() the stop-gradient:

         value            its mean         in the loss: E[grad value]     in the reward: E[sg(value) S]
    k1   d                KL(pi|ref)       0: only noise                  grad KL(pi|ref)
    k2   d^2 / 2          near KL(pi|ref)  grad KL(pi|ref)                E[d^2 S] / 2, of no divergence
    k3   exp(-d) - 1 + d  KL(pi|ref)       grad KL(ref|pi)                grad KL(pi|ref) - grad KL(ref|pi)
    abs  |d|              not KL           grad sum_x |pi(x) - ref(x)|    E[|d| S], of no divergence
    full sum_x pi(x) d(x) KL(pi|ref)       grad KL(pi|ref)                0: the same for every token x
    full_forward          KL(ref|pi)       grad KL(ref|pi)                0
    full_jensen_shannon   JS(pi, ref)      grad JS(pi, ref)               0

To regularise by KL(pi|ref), use k1 in the reward, or k2 or full in the loss. full has no sampling noise. k3
in the loss, as in the published GRPO, has the gradient of the forward KL, which agrees with that of the
reverse KL to first order in d; in the reward, the gradient of k3 cancels to first order. A loss term acts
only on its own token, a reward term also on the tokens before it, so over a sequence only the latter gives
the gradient of the sequence's KL.

Sources: Schulman 2020, joschu.net/blog/kl-approx.html, for the values of k1, k2 and k3; Tang & Munos 2025
(arXiv 2506.09477) and Liu et al. 2025 (arXiv 2510.01555) for the gradients.
tests/learning/test_exact_gradients.py verifies them by enumeration.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from braid.types import KlEstimator

MAX_EXPONENT = 20.0
"""Bound on k3's exponent, with or without a clamp: exp(20) is 4.9e8, far beyond any useful penalty."""

MAX_STEERING = 0.2
"""Bound on the relative error of one round that the driver reacts to; as in ROLL and SkyRL."""


def kl_estimate(
    logprobs: Float[Tensor, "T"],
    ref_logprobs: Float[Tensor, "T"],
    *,
    estimator: KlEstimator,
    clamp: float | None,
) -> Float[Tensor, "T"]:
    """Estimates of KL(policy | reference) in nats, one per token. Formulas and gradients: module docstring.

    Both log-probs are of the sampling distribution (logits divided by the temperature). `clamp` bounds the
    absolute value; where it binds, the gradient is 0. k3 is exact up to ref_logprobs - logprobs = 20 and
    constant beyond, so neither value nor gradient overflows.

    RLinf, ROLL and SkyRL always clamp k3, and only k3, to 10. RLinf's FSDP actor swaps the two log-probs,
    which estimates a different divergence; it lists a `full` estimator but raises on it. The reference of
    SkyRL's FSDP backend ignores the temperature, ROLL's trainer ignores it everywhere.
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            kl = difference
        case "k2":
            kl = 0.5 * difference.square()
        case "k3":
            # expm1 avoids the cancellation of exp(-d) - 1 near d = 0, where most tokens are.
            exponent = (-difference).clamp(max=MAX_EXPONENT)
            kl = exponent.expm1() - exponent
        case "abs":
            kl = difference.abs()
        case "full" | "full_forward" | "full_jensen_shannon":
            raise AssertionError(f"{estimator} is computed from all logits (models.logprobs)")
    return clamped(kl, clamp)


def clamped(kl: Float[Tensor, "T"], clamp: float | None) -> Float[Tensor, "T"]:
    """`kl` with its absolute value bounded by `clamp`."""
    return kl if clamp is None else kl.clamp(-clamp, clamp)


def steered_coefficient(
    coef: float, kl: float, *, target: float, num_trajectories: int, horizon: float
) -> float:
    """The KL coefficient after a round of `num_trajectories` whose mean KL per token was `kl`:

        coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_trajectories / horizon)

    It grows while KL exceeds `target` and shrinks while KL is below it (Ziegler et al. 2019, arXiv
    1909.08593). It never becomes negative, however many trajectories a round has. ROLL and SkyRL: the same
    without that bound. RLinf's coefficient is fixed.
    """
    error = min(max(kl / target - 1.0, -MAX_STEERING), MAX_STEERING)
    return max(0.0, coef * (1.0 + error * num_trajectories / horizon))
