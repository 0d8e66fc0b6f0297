"""Which tokens clip_cov and kl_cov act upon: those whose advantage and log-prob rise together.

Cui et al. 2025 (arXiv 2505.22617): a policy-gradient step changes the entropy by about minus the covariance of log-probs
and advantages, and a few tokens make up most of it. Owns the choice among the tokens of one optimizer step; what is done to
the chosen is policy_loss.py's. The choice is made before the step's first forward pass from what is known then (the old
log-probs), so it is the same for every micro-batch size, packing and number of ranks.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def covariances(advantages: Float[Tensor, "N"], logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """(A - mean A) (log p - mean log p) for each of the N tokens that the policy wrote in a step, in float64."""
    exact = advantages.double(), logprobs.double()
    centered = [x - x.mean() for x in exact]
    return centered[0] * centered[1]


def choose_within(
    covariances: Float[Tensor, "N"],
    priorities: Float[Tensor, "N"],
    *,
    fraction: float,
    low: float,
    high: float,
) -> Bool[Tensor, "N"]:
    """clip_cov's choice: tokens with low < covariance < high, a share `fraction` of all N at most.

    When there are more, those with the lowest `priorities` are taken, which are to be uniform random numbers: a draw without
    replacement, as in the paper.
    """
    candidates = ((covariances > low) & (covariances < high)).nonzero().squeeze(1)
    num = min(_count(fraction, len(covariances)), len(candidates))
    return _marked(candidates[priorities[candidates].argsort()[:num]], len(covariances))


def choose_greatest(
    covariances: Float[Tensor, "N"], priorities: Float[Tensor, "N"], *, fraction: float
) -> Bool[Tensor, "N"]:
    """kl_cov's choice: the share `fraction` with the greatest covariances; among equal ones the lowest `priorities`."""
    by_priority = priorities.argsort()
    order = by_priority[covariances[by_priority].argsort(descending=True, stable=True)]
    return _marked(order[: _count(fraction, len(covariances))], len(covariances))


def _count(fraction: float, num_tokens: int) -> int:
    """The paper's: rounded down, but at least one token; none for a share of 0."""
    return min(num_tokens, max(1, int(fraction * num_tokens))) if fraction > 0 else 0


def _marked(indices: Tensor, num_tokens: int) -> Tensor:
    return torch.zeros(num_tokens, dtype=torch.bool, device=indices.device).index_fill_(0, indices, True)
