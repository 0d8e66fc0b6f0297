"""Credit: from rewards to per-row or per-token advantages.

Owns the estimators and whitening. Placing rewards on positions, taking KL off them, cutting rows into turns and spreading
the advantage of a row over its tokens are the caller's. Statistics are taken in float64 and given back in the dtype of the
input. Everywhere a row is one valid trajectory, and any integers number the groups, in any order, of any sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a standard deviation that rewards are divided by; the value of RLinf, ROLL and SkyRL."""

MEAN_EPSILON = 1e-6
"""Added to the mean that maxrl divides by; SkyRL's value."""

WHITEN_VARIANCE_EPSILON = 1e-8
"""Added to the variance when whitening; the value of ROLL and SkyRL."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rewards beside the moments of each row's group: float64 [B] each, `std` the unbiased one (divisor n - 1).

    `centered` is the reward less its group's mean. Where all rewards of a group are equal it and `std` are exactly 0.
    """

    count: Tensor
    mean: Tensor
    std: Tensor
    centered: Tensor


def grouped(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Grouped:
    """The moments of each row's group."""
    _, group = groups.unique(return_inverse=True)
    zeros = torch.zeros(len(groups), dtype=torch.float64, device=rewards.device)  # at most one group a row
    count = zeros.index_add(0, group, torch.ones_like(zeros))[group]
    exact = rewards.double()
    # Measured from the group's lowest reward, equal rewards are exactly 0 whatever their binary fraction.
    lowest = zeros.scatter_reduce(0, group, exact, "amin", include_self=False)[group]
    above = exact - lowest
    mean = zeros.index_add(0, group, above)[group] / count
    centered = above - mean
    variance = zeros.index_add(0, group, centered.square())[group] / (count - 1).clamp(min=1)
    return Grouped(count, lowest + mean, variance.sqrt(), centered)


def group_advantages(
    rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, normalize_by_std: bool
) -> Float[Tensor, "B"]:
    """grpo: how much better each row did than its group.

        A_b = r_b - mean_g(r)                            normalize_by_std = False (Dr. GRPO, arXiv 2503.20783)
        A_b = (r_b - mean_g(r)) / (std_g(r) + 1e-6)      normalize_by_std = True  (GRPO, arXiv 2402.03300)

    A group of one, and a group whose rewards are all equal, get exactly 0. "Rows" may be turns: RLinf's grpo_dynamic
    compares the rewards of all turns of a group in this way.

    The mean includes the row itself, so for a group of G the expected gradient without std is (G - 1) / G of the true
    one. RLinf and ROLL use the same formula (in ROLL's agentic pipelines grpo normalises nothing by itself); SkyRL gives a
    group of one its raw reward.
    """
    of = grouped(rewards, groups)
    advantages = of.centered / (of.std + STD_EPSILON) if normalize_by_std else of.centered
    return advantages.to(rewards.dtype)


def leave_one_out_advantages(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """rloo (arXiv 2402.14740): the reward less the mean of the others in the group.

        A_b = r_b - sum_{j in g, j != b} r_j / (n - 1) = (r_b - mean_g(r)) n / (n - 1)

    The baseline does not know the row's own answer, so the expected gradient is the true one. A group of one has no
    others and gets 0. SkyRL: the same. RLinf and ROLL have none.
    """
    of = grouped(rewards, groups)
    return (of.centered * of.count / (of.count - 1).clamp(min=1)).to(rewards.dtype)


def baseline_advantages(rewards: Float[Tensor, "B"], baselines: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """remax (arXiv 2310.10505): A_b = r_b - the reward of the greedy answer to the same prompt.

    The greedy answer hangs on the prompt and the policy alone, so the expected gradient is the true one, for groups of any
    size. None of RLinf, ROLL and SkyRL has it.
    """
    return (rewards.double() - baselines.double()).to(rewards.dtype)


def best_of_group(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """raft (arXiv 2304.06767): 1 for the row with the greatest reward of its group, the first of them on a tie; else 0.

    With a plain policy gradient the others leave the numerator of the loss and stay in its denominators. A group whose
    rewards are all equal has no best row and gets 0 throughout, so that nothing is imitated for being first; the paper
    would take one at random. What ROLL calls RAFT++ is grpo without its deviation.
    """
    _, group = groups.unique(return_inverse=True)

    def over_group(values: Tensor, reduce: str) -> Tensor:
        return values.scatter_reduce(0, group, values, reduce, include_self=False)[group]

    best, worst = over_group(rewards, "amax"), over_group(rewards, "amin")
    nowhere = len(groups)
    places = torch.arange(nowhere, device=rewards.device)
    of_best = torch.where((rewards == best) & (best > worst), places, nowhere)
    return (places == over_group(of_best, "amin")).to(rewards.dtype)


def likelihood_advantages(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """maxrl (arXiv 2602.02710): A_b = (r_b - mean_g(r)) / (mean_g(r) + 1e-6).

    For rewards of 0 and 1, where the mean estimates the pass rate p of a prompt: the expected gradient for groups of G is
    that of the first G - 1 terms of log p = -sum_k (1 - p)^k / k, where the plain policy gradient has the first alone.
    So seldom solved prompts weigh more, as under maximum likelihood. Rewards between 0 and 1 work as shares of success. With
    negative ones the mean is no rate: it may be near 0, or turn the gradient around. So a group whose mean is not above 0
    gets 0 here. SkyRL: the formula as it stands, and the raw reward for a group of one.
    """
    of = grouped(rewards, groups)
    relative = of.centered / (of.mean + MEAN_EPSILON)
    return torch.where(of.mean > 0, relative, 0.0).to(rewards.dtype)


def discounted_returns(
    rewards: Float[Tensor, "T"], mask: Bool[Tensor, "T"], lengths: Sequence[int], *, gamma: float
) -> Float[Tensor, "T"]:
    """reinforce (Williams 1992): what comes after, G_k = r_k + gamma G_{k+1}, over the positions of a row inside the mask;
    0 outside it, where `rewards` is not read.

    REINFORCE++ (arXiv 2501.03262) whitens these. Without a critic there is nothing to bootstrap from: the return of an
    episode cut by a limit of time ends there. "Positions" may be turns: so gigpo discounts.

    ROLL: the same over the padded width, rewards of environment tokens counted. SkyRL multiplies the running sum with the
    mask, so that a turn sees nothing of what follows the environment's reply. RLinf: gamma = 1.
    """
    row = _rows_of_positions(lengths, mask)[mask]
    decay = gamma * (~_is_last(row)).double()
    returns = torch.zeros_like(rewards)
    sums = _discounted_suffix_sums(rewards[mask].double(), decay, max(lengths, default=0))
    returns[mask] = sums.to(rewards.dtype)
    return returns


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
    row = _rows_of_positions(lengths, mask)[mask]
    reward, value, is_last = rewards[mask].double(), values[mask].double(), _is_last(row)
    next_value = torch.where(is_last, bootstrap.double()[row], value.roll(-1))
    delta = reward + gamma * next_value - value
    advantage = _discounted_suffix_sums(delta, gamma * lam * (~is_last).double(), max(lengths, default=0))

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[mask] = advantage.to(values.dtype)
    returns[mask] = (advantage + value).to(values.dtype)
    return advantages, returns


def _rows_of_positions(lengths: Sequence[int], mask: Tensor) -> Tensor:
    """The number of each position's row."""
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device=mask.device))


def _is_last(row: Tensor) -> Tensor:
    """Whether a position is the last of its row, where all that are given count."""
    is_last = torch.ones_like(row, dtype=torch.bool)
    is_last[:-1] = row[1:] != row[:-1]
    return is_last


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
