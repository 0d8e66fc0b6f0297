"""Token selection for clip_cov and kl_cov: tokens with a high covariance of advantage and log-prob.

Cui et al. 2025 (arXiv 2505.22617): a policy-gradient step changes the entropy by about minus the covariance
of log-probs and advantages, and a few tokens account for most of it. Owns the selection among the tokens of
one optimizer step; policy_losses/clip_cov.py and kl_cov.py apply it. Tokens are selected before the step's
first forward pass, from the old log-probs, so the selection does not depend on micro-batch size, packing or
number of ranks.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def covariances(advantages: Float[Tensor, "N"], logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """(A - mean A) (log p - mean log p) for each of the N policy tokens of a step, in float64."""
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
    """Select the tokens of clip_cov: low < covariance < high, at most a `fraction` of all N.

    If there are more, the ones with the lowest `priorities` are selected. Pass uniform random numbers as
    priorities to sample without replacement, as in the paper.
    """
    candidates = ((covariances > low) & (covariances < high)).nonzero().squeeze(1)
    num = min(_count(fraction, len(covariances)), len(candidates))
    return _marked(candidates[priorities[candidates].argsort()[:num]], len(covariances))


def choose_greatest(
    covariances: Float[Tensor, "N"], priorities: Float[Tensor, "N"], *, fraction: float
) -> Bool[Tensor, "N"]:
    """Select the tokens of kl_cov: the `fraction` with the greatest covariances; ties go to the lowest
    `priorities`."""
    by_priority = priorities.argsort()
    order = by_priority[covariances[by_priority].argsort(descending=True, stable=True)]
    return _marked(order[: _count(fraction, len(covariances))], len(covariances))


def _count(fraction: float, num_tokens: int) -> int:
    """Number of tokens to select, as in the paper: rounded down, but at least one; 0 for a fraction of 0."""
    return min(num_tokens, max(1, int(fraction * num_tokens))) if fraction > 0 else 0


def _marked(indices: Tensor, num_tokens: int) -> Tensor:
    return torch.zeros(num_tokens, dtype=torch.bool, device=indices.device).index_fill_(0, indices, True)
