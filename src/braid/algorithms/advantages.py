"""Credit: from rewards to per-row or per-token advantages.

Owns the estimators and whitening. Placing rewards on positions, taking KL off them and spreading the
advantage of a row over its tokens are the caller's. Statistics are taken in float64 and given back in the
dtype of the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

GROUP_STD_EPSILON = 1e-6
"""Added to a group's standard deviation; the value of RLinf, ROLL and SkyRL."""

WHITEN_VARIANCE_EPSILON = 1e-8
"""Added to the variance when whitening; the value of ROLL and SkyRL."""


def group_advantages(
    rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, normalize_by_std: bool
) -> Float[Tensor, "B"]:
    """How much better each row did than its group.

        A_b = r_b - mean_g(r)                            normalize_by_std = False (Dr. GRPO, arXiv 2503.20783)
        A_b = (r_b - mean_g(r)) / (std_g(r) + 1e-6)      normalize_by_std = True  (GRPO, arXiv 2402.03300)

    std is the unbiased one (divisor n - 1). Any integers number the groups, in any order, of any sizes. A
    group of one, and a group whose rewards are all equal, get exactly 0. Only valid rows belong in here.

    The mean includes the row itself, so for a group of G the expected gradient without std is (G - 1) / G of
    the true one. RLinf and ROLL use the same formula; SkyRL gives a group of one its raw reward.
    """
    _, group = groups.unique(return_inverse=True)
    zeros = torch.zeros(len(groups), dtype=torch.float64, device=rewards.device)  # at most one group a row
    count = zeros.index_add(0, group, torch.ones_like(zeros))
    exact = rewards.double()
    # Measured from the group's lowest reward, equal rewards are exactly 0 whatever their binary fraction.
    lowest = zeros.scatter_reduce(0, group, exact, "amin", include_self=False)
    above = exact - lowest[group]
    mean = zeros.index_add(0, group, above) / count.clamp(min=1)
    centered = above - mean[group]
    if normalize_by_std:
        variance = zeros.index_add(0, group, centered.square()) / (count - 1).clamp(min=1)
        centered = centered / (variance.sqrt()[group] + GROUP_STD_EPSILON)
    return centered.to(rewards.dtype)


def gae(
    rewards: Float[Tensor, "T"],
    values: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    lengths: Sequence[int],
    bootstrap: Float[Tensor, "B"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "T"], Float[Tensor, "T"]]:
    """Generalized advantage estimation (arXiv 1506.02438): (advantages, returns), both 0 outside the mask.

    Over the positions k = 1..K of a row that the policy wrote:

        delta_k = r_k + gamma V_{k+1} - V_k
        A_k     = delta_k + gamma lam A_{k+1}        A_{K+1} = 0
        R_k     = A_k + V_k

    V_k is of the state just before position k; V_{K+1} is the row's bootstrap, the value of the state after
    its last position, 0 when that is terminal. Environment tokens between turns are skipped: the last token
    of a turn is followed by the first of the next, and what rewards and values hold outside the mask is not
    read.

    Takes about log2(longest row) operations on [T]. ROLL and SkyRL run over the padded width with whatever
    values padding and environment tokens have. RLinf puts a text's reward on the last padded position, so
    that its discount depends on the padding.
    """
    row = torch.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device=mask.device))[mask]
    reward, value = rewards[mask].double(), values[mask].double()
    is_last = torch.ones_like(row, dtype=torch.bool)
    is_last[:-1] = row[1:] != row[:-1]
    next_value = torch.where(is_last, bootstrap.double()[row], value.roll(-1))
    delta = reward + gamma * next_value - value
    advantage = _discounted_suffix_sums(delta, gamma * lam * (~is_last).double(), max(lengths, default=0))

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[mask] = advantage.to(values.dtype)
    returns[mask] = (advantage + value).to(values.dtype)
    return advantages, returns


def _discounted_suffix_sums(x: Tensor, decay: Tensor, longest: int) -> Tensor:
    """y_t = x_t + decay_t * y_{t+1}, where at most `longest` positions follow each other before a decay of 0.

    After the pass with shift s, x_t holds the terms of 2s positions and decay_t the product of as many decays
    (Hillis & Steele 1986, parallel prefix).
    """
    x, decay = x.clone(), decay.clone()
    shift = 1
    while shift < longest:
        x[:-shift] = x[:-shift] + decay[:-shift] * x[shift:]
        decay[:-shift] = decay[:-shift] * decay[shift:]
        shift *= 2
    return x


def whiten(advantages: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Float[Tensor, "T"]:
    """(A - mean) / sqrt(variance + 1e-8) over the masked positions, variance unbiased; 0 outside the mask.

    Give it all positions of a round at once: the result then does not depend on how a round is cut. A single
    position, and advantages that are all equal, become 0.

    ROLL: the same, per domain. RLinf adds 1e-5 to the standard deviation instead, and whitens on top of GRPO
    too. SkyRL always whitens after GAE; its own normalisation of the batch takes the mean over padding too.
    """
    exact = torch.where(mask, advantages, 0.0).double()
    count = mask.sum()
    centered = torch.where(mask, exact - exact.sum() / count.clamp(min=1), 0.0)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    return (centered * (variance + WHITEN_VARIANCE_EPSILON).rsqrt()).to(advantages.dtype)
