"""Advantage estimators: from rewards to per-row or per-token advantages.

Owns the estimators and whitening. Assigning rewards to positions, subtracting KL, splitting rows into turns
and broadcasting a row's advantage over its tokens are left to the caller. Statistics are computed in float64
and returned in the dtype of the input. A row is always one valid trajectory; group ids are arbitrary
integers, and groups may differ in size and be in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation that rewards are divided by; as in RLinf, ROLL and SkyRL."""

EQUAL_RELATIVE, EQUAL_ABSOLUTE = 2.0**-23, 1e-12
"""Rewards of a group are equal if they differ by no more than this: by the resolution of float32 at the
largest of them, in which simulators report. Sums that were rounded differently would otherwise be divided by
their tiny deviation."""

MEAN_EPSILON = 1e-6
"""Added to the mean that maxrl divides by; as in SkyRL."""

WHITEN_VARIANCE_EPSILON = 1e-8
"""Added to the variance when whitening; as in ROLL and SkyRL."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Statistics of each row's group, broadcast to rows: float64 [B] each; `std` is unbiased (divisor n - 1).

    `centered` is the reward minus its group's mean. `centered` and `std` are exactly 0 if all rewards of the
    group are equal, up to EQUAL_RELATIVE and EQUAL_ABSOLUTE.
    """

    count: Tensor
    mean: Tensor
    std: Tensor
    centered: Tensor


def grouped(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Grouped:
    """Compute the statistics of each row's group."""
    _, group = groups.unique(return_inverse=True)
    zeros = torch.zeros(len(groups), dtype=torch.float64, device=rewards.device)  # at most one group per row
    count = zeros.index_add(0, group, torch.ones_like(zeros))[group]
    exact = rewards.double()
    lowest, _, is_equal = _extremes(exact, group)
    # Subtracting the group's minimum first makes equal rewards exactly 0, without rounding errors.
    above = torch.where(is_equal, 0.0, exact - lowest)
    mean = zeros.index_add(0, group, above)[group] / count
    centered = above - mean
    variance = zeros.index_add(0, group, centered.square())[group] / (count - 1).clamp(min=1)
    return Grouped(count, lowest + mean, variance.sqrt(), centered)


def _extremes(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row's group: lowest and highest reward, and whether all are equal."""

    def over_group(reduce: str) -> Tensor:
        return rewards.scatter_reduce(0, group, rewards, reduce, include_self=False)[group]

    lowest, highest = over_group("amin"), over_group("amax")
    tolerance = EQUAL_ABSOLUTE + EQUAL_RELATIVE * torch.maximum(lowest.abs(), highest.abs())
    return lowest, highest, highest - lowest <= tolerance


def reward_std(rewards: Sequence[float]) -> float:
    """Unbiased standard deviation of one group's rewards; exactly 0 if they are equal, as in `grouped`."""
    values = torch.tensor(rewards, dtype=torch.float64)
    return float(grouped(values, torch.zeros(len(values), dtype=torch.long)).std[0])


def group_advantages(
    rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"], *, normalize_by_std: bool
) -> Float[Tensor, "B"]:
    """grpo: the reward relative to the mean of its group.

        A_b = r_b - mean_g(r)                            normalize_by_std = False (Dr. GRPO, arXiv 2503.20783)
        A_b = (r_b - mean_g(r)) / (std_g(r) + 1e-6)      normalize_by_std = True  (GRPO, arXiv 2402.03300)

    Exactly 0 for a group of one and for a group with equal rewards. A "row" may also be a turn: RLinf's
    grpo_dynamic compares the rewards of all turns of a group in this way.

    The mean includes the row itself, so without std the expected gradient for groups of G is (G - 1) / G
    times the true one. RLinf and ROLL use the same formula (in ROLL's agentic pipelines, grpo itself does not
    normalise); SkyRL uses the raw reward for a group of one.
    """
    statistics = grouped(rewards, groups)
    advantages = (
        statistics.centered / (statistics.std + STD_EPSILON) if normalize_by_std else statistics.centered
    )
    return advantages.to(rewards.dtype)


def leave_one_out_advantages(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """rloo (arXiv 2402.14740): the reward minus the mean reward of the other rows in the group.

        A_b = r_b - sum_{j in g, j != b} r_j / (n - 1) = (r_b - mean_g(r)) n / (n - 1)

    The baseline is independent of the row's own response, so the gradient is unbiased. A group of one gets 0.
    SkyRL: the same. Not in RLinf and ROLL.
    """
    statistics = grouped(rewards, groups)
    return (statistics.centered * statistics.count / (statistics.count - 1).clamp(min=1)).to(rewards.dtype)


def baseline_advantages(rewards: Float[Tensor, "B"], baselines: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """remax (arXiv 2310.10505): A_b = r_b - the reward of the greedy response to the same prompt.

    The greedy response depends only on prompt and policy, so the gradient is unbiased for groups of any size.
    Not in RLinf, ROLL and SkyRL.
    """
    return (rewards.double() - baselines.double()).to(rewards.dtype)


def best_of_group(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """raft (arXiv 2304.06767): 1 for the row with the highest reward of its group, the first one on a tie;
    else 0.

    With a plain policy gradient, the other rows add nothing to the numerator of the loss but still count in
    its denominators. A group with equal rewards gets 0 throughout, so that no row is imitated merely for
    being first; the paper would choose one at random. ROLL's RAFT++ is grpo without the standard deviation.
    """
    _, group = groups.unique(return_inverse=True)
    exact = rewards.double()
    _, best, is_equal = _extremes(exact, group)
    is_best = best - exact <= EQUAL_ABSOLUTE + EQUAL_RELATIVE * best.abs()
    nowhere = len(groups)
    places = torch.arange(nowhere, device=rewards.device)
    of_best = torch.where(is_best & ~is_equal, places, nowhere)
    first = of_best.scatter_reduce(0, group, of_best, "amin", include_self=False)[group]
    return (places == first).to(rewards.dtype)


def likelihood_advantages(rewards: Float[Tensor, "B"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """maxrl (arXiv 2602.02710): A_b = (r_b - mean_g(r)) / (mean_g(r) + 1e-6).

    Meant for rewards of 0 and 1, whose mean estimates the pass rate p of a prompt: the expected gradient for
    groups of G is that of the first G - 1 terms of log p = -sum_k (1 - p)^k / k, whereas the plain policy
    gradient has only the first. Prompts that are rarely solved therefore weigh more, as under maximum
    likelihood. Rewards between 0 and 1 act as partial success. With negative rewards the mean is not a
    pass rate: it may be close to 0 or flip the sign of the gradient. A group whose mean is not positive
    therefore gets 0. SkyRL: the plain formula, and the raw reward for a group of one.
    """
    statistics = grouped(rewards, groups)
    relative = statistics.centered / (statistics.mean + MEAN_EPSILON)
    return torch.where(statistics.mean > 0, relative, 0.0).to(rewards.dtype)


def discounted_returns(
    rewards: Float[Tensor, "T"], mask: Bool[Tensor, "T"], lengths: Sequence[int], *, gamma: float
) -> Float[Tensor, "T"]:
    """reinforce (Williams 1992): discounted returns G_k = r_k + gamma G_{k+1} over the masked positions of a
    row.

    0 outside the mask; `rewards` is not read there. REINFORCE++ (arXiv 2501.03262) whitens the result.
    Without a critic there is no bootstrap value: the return of an episode cut by a time limit ends there.
    "Positions" may be turns, as in gigpo.

    ROLL: the same over the padded width, including rewards of environment tokens. SkyRL multiplies the
    running sum by the mask, so a turn receives no return from after the environment's reply. RLinf: gamma =
    1.
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

    Over the policy positions k = 1..K of a row:

        delta_k = r_k + gamma V_{k+1} - V_k
        A_k     = delta_k + gamma lam A_{k+1}        A_{K+1} = 0
        R_k     = A_k + V_k

    V_k is the value of the state before position k; V_{K+1} is the row's bootstrap value, that of the state
    after its last position (0 if terminal). Environment tokens between turns are skipped: the last token of a
    turn is followed by the first of the next, and `rewards` and `values` are not read outside the mask.

    Takes about log2(longest row) operations on [T]. ROLL and SkyRL run over the padded width, including the
    values at padding and environment tokens. RLinf puts the reward of a text on the last padded position, so
    its discount depends on the padding.
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
    """The row index of each position."""
    return torch.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device=mask.device))


def _is_last(row: Tensor) -> Tensor:
    """Whether a position is the last of its row, among the given positions."""
    is_last = torch.ones_like(row, dtype=torch.bool)
    is_last[:-1] = row[1:] != row[:-1]
    return is_last


def _discounted_suffix_sums(x: Tensor, decay: Tensor, longest: int) -> Tensor:
    """y_t = x_t + decay_t * y_{t+1}, for runs of at most `longest` positions, each ended by a decay of 0.

    After the pass with shift s, x_t holds the sum over 2s positions and decay_t the product of 2s decays
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

    Pass all positions of a round at once, so that the result does not depend on how the round is split. A
    single position, and advantages that are all equal, become 0.

    ROLL: the same, per domain. RLinf adds 1e-5 to the standard deviation instead, and also whitens on top of
    GRPO. SkyRL always whitens after GAE; its separate batch normalisation includes padding in the mean.
    """
    exact = torch.where(mask, advantages, 0.0).double()
    count = mask.sum()
    centered = torch.where(mask, exact - exact.sum() / count.clamp(min=1), 0.0)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    return (centered * (variance + WHITEN_VARIANCE_EPSILON).rsqrt()).to(advantages.dtype)
