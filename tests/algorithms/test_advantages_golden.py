"""Advantages and reward statistics against numbers worked out by hand.

Those of grpo, gae and whitening are in tests/golden.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from braid.algorithms.advantages.gae import gae
from braid.algorithms.advantages.gpg import rescaled_advantages
from braid.algorithms.advantages.grpo import group_advantages
from braid.algorithms.advantages.maxrl import likelihood_advantages
from braid.algorithms.advantages.opo import length_weighted_advantages
from braid.algorithms.advantages.pass_at_k import pass_at_k_advantages
from braid.algorithms.advantages.raft import best_of_group
from braid.algorithms.advantages.reinforce import discounted_returns
from braid.algorithms.advantages.remax import baseline_advantages
from braid.algorithms.advantages.rloo import leave_one_out_advantages
from braid.algorithms.advantages.whitening import whiten
from braid.algorithms.kl import steered_coefficient
from braid.algorithms.rewards import RunningMoments, reward_statistics

CLOSE = {"atol": 1e-6, "rtol": 0}  # expectations are given to six digits
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


def _close(got: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(got.float(), torch.tensor(expected, dtype=torch.float32), **CLOSE)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 6 - 3, 3 - 6; 9 - 12, 12 - 9; nobody else
    advantages = leave_one_out_advantages(
        torch.tensor([6.0, 3.0, 9.0, 12.0, 1.0]), torch.tensor([0, 0, 1, 1, 2])
    )
    _close(advantages, 3.0, -3.0, -3.0, 3.0, 0.0)
    # others of 1: 0 and 5, mean 2.5; of 0: 1 and 5, mean 3; of 5: 1 and 0, mean 0.5
    _close(leave_one_out_advantages(torch.tensor([1.0, 0.0, 5.0]), torch.zeros(3).long()), -1.5, -3.0, 4.5)


def test_remax_subtracts_the_reward_of_the_greedy_answer() -> None:
    advantages = baseline_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.5, 0.5, 1.0]))
    _close(advantages, 0.5, -0.5, -0.5)


def test_raft_keeps_the_first_best_of_each_group() -> None:
    rewards = torch.tensor([0.0, 0.7, 1.0, 0.7, 0.2, 1.0, -3.0, 0.1, 0.1])
    groups = torch.tensor([0, 1, 0, 1, 1, 0, 2, 3, 3])
    # group 0: 0, 1, 1: the first 1; group 1: .7, .7, .2: the first .7; a group of one; a group of equals
    _close(best_of_group(rewards, groups), 0, 1, 1, 0, 0, 0, 0, 0, 0)


def test_maxrl_divides_by_the_pass_rate() -> None:
    # group 0: p = 1/4, so 0.75 / 0.25 and -0.25 / 0.25; group 1: p = 1/2; none right; all right
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 3])
    advantages = likelihood_advantages(rewards, groups)
    expected = torch.tensor([3.0, -1, -1, -1, 1, -1, 0, 0, 0, 0])
    torch.testing.assert_close(advantages, expected, atol=2e-5, rtol=0)  # 1e-6 beside 1/4, times 3


def test_maxrl_learns_nothing_if_the_mean_reward_is_not_a_rate() -> None:
    advantages = likelihood_advantages(torch.tensor([1.0, -1.0, -2.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    _close(advantages, 0, 0, 0, 0)


def test_opo_weighs_the_baseline_by_length() -> None:
    # baseline (1 * 10 + 0 * 30) / 40 = 0.25; then equal rewards; then a group of one
    rewards, lengths = torch.tensor([1.0, 0.0, 0.3, 0.3, 5.0]), torch.tensor([10, 30, 1, 7, 3])
    _close(length_weighted_advantages(rewards, torch.tensor([0, 0, 1, 1, 2]), lengths), 0.75, -0.25, 0, 0, 0)


def test_gpg_scales_by_the_share_of_trajectories_with_a_signal() -> None:
    # 6 trajectories, 2 of them in a group whose rewards differ: 3 times +-0.5
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    _close(rescaled_advantages(rewards, groups), 1.5, -1.5, 0, 0, 0, 0)
    _close(rescaled_advantages(torch.ones(2), torch.tensor([0, 0])), 0, 0)


def test_pass_at_k_is_the_mean_advantage_of_the_sets_with_the_answer() -> None:
    # one of 4 right, sets of 2: R = 1 - 3/6, s = 0.5; right 0.5 / 0.5; wrong (0.5 - 2/3) / 0.5
    _close(
        pass_at_k_advantages(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4).long(), k=2),
        1,
        -1 / 3,
        -1 / 3,
        -1 / 3,
    )
    # k = 1: R = 0.25, s = 0.433013: 0.75 / s and -0.25 / s
    expected = (1.7320508, -0.5773503, -0.5773503, -0.5773503)
    _close(pass_at_k_advantages(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4).long(), k=1), *expected)
    # fewer wrong than k: every set succeeds; a group of 2 is one set; none right
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    _close(pass_at_k_advantages(torch.tensor([1.0, 1, 0, 1, 0, 0, 0]), groups, k=2), *[0] * 7)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("num_right", [1, 2, 3])
def test_pass_at_k_equals_the_mean_over_all_sets(k: int, num_right: int) -> None:
    rewards = (torch.arange(5) < num_right).double()
    sets = list(combinations(range(5), k))
    successes = torch.tensor([float(rewards[list(members)].max()) for members in sets], dtype=torch.float64)
    std = successes.std(correction=0)
    normalised = (successes - successes.mean()) / std if std > 0 else torch.zeros_like(successes)
    expected = [normalised[[i in members for members in sets]].mean() for i in range(5)]
    _close(pass_at_k_advantages(rewards, torch.zeros(5).long(), k=k), *map(float, expected))


@pytest.mark.parametrize(
    ("gamma", "mask", "expected"),
    [
        (0.5, (1, 1, 1), [2.75, 3.5, 3.0]),  # 1 + (2 + 3/2) / 2, 2 + 3/2, 3
        (1.0, (1, 1, 0), [3.0, 2.0, 0.0]),  # the 3 is not the policy's
        (0.5, (1, 0, 1), [2.5, 0.0, 3.0]),  # the environment's token discounts nothing
        (0.0, (1, 1, 1), [1.0, 2.0, 3.0]),
    ],
)
def test_returns_are_discounted_sums_of_later_rewards(
    gamma: float, mask: tuple[int, ...], expected: list[float]
) -> None:
    rewards, of_policy = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(mask, dtype=torch.bool)
    _close(discounted_returns(rewards, of_policy, (3,), gamma=gamma), *expected)


def test_returns_of_one_row_end_with_it() -> None:
    everywhere = torch.ones(4, dtype=torch.bool)
    _close(
        discounted_returns(torch.tensor([0.0, 1.0, 0.0, 2.0]), everywhere, (2, 2), gamma=0.5), 0.5, 1, 1, 2
    )


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [(1.0, 1.0, [6.0, 5.0, 3.0]), (0.5, 1.0, [2.75, 3.5, 3.0]), (1.0, 0.5, [3.625, 4.25, 3.0])],
)
def test_gae_gives_the_returns_of_its_recursion(gamma: float, lam: float, expected: list[float]) -> None:
    # e.g. lam = .5: delta = 1 + 1 - .5, 2 + 1.5 - 1, 3 - 1.5; A = 1.5 + (2.5 + .75) / 2, 2.5 + .75, 1.5; plus
    # values
    _, returns = gae(
        torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.0, 1.5]), torch.ones(3, dtype=torch.bool), (3,),
        torch.zeros(1), gamma=gamma, lam=lam,
    )  # fmt: skip
    _close(returns, *expected)


def test_whitening_leaves_masked_gaps_unchanged() -> None:
    # over 5.5 and 1.5 (gae of 1, -, 3 against .5, -, 1.5): mean 3.5, variance 8
    mask = torch.tensor([True, False, True])
    _close(whiten(torch.tensor([5.5, 4.0, 1.5]), mask), 0.707107, 0.0, -0.707107)


def _normalized(mean: str, std: str, running: RunningMoments | None = None) -> torch.Tensor:
    center, scale = reward_statistics(
        REWARDS, GROUPS, mean=mean, std=std, running=running or RunningMoments()
    )
    return (REWARDS - center) / scale


def test_group_mean_and_deviation_give_grpo() -> None:
    # group 0: mean 1/2, std sqrt(1/3) = 0.577350; group 1: equal
    normalized = _normalized("group", "group")
    _close(normalized, 0.866024, -0.866024, -0.866024, 0.866024, 0, 0, 0, 0)
    torch.testing.assert_close(
        normalized.float(), group_advantages(REWARDS, GROUPS, normalize_by_std=True), **CLOSE
    )


def test_group_mean_and_batch_deviation_give_lite_ppo() -> None:
    # batch: mean 3/4, variance (6/16 + 2 * 9/16) / 7 = 0.214286, std 0.462910; 0.5 / 0.462911
    _close(_normalized("group", "batch"), 1.080121, -1.080121, -1.080121, 1.080121, 0, 0, 0, 0)


def test_the_batchs_mean_alone() -> None:
    _close(_normalized("batch", "none"), 0.25, -0.75, -0.75, 0.25, 0.25, 0.25, 0.25, 0.25)


def test_a_deviation_of_0_divides_by_1() -> None:
    # group 0: 1 / 0.577351; group 1 stays
    _close(_normalized("none", "group"), 1.732048, 0, 0, 1.732048, 1, 1, 1, 1)


def test_running_moments_are_those_of_all_rounds() -> None:
    # 3, 5 before; with the round's 1, 0, 0, 1, 1, 1, 1, 1: sum 14 of 10, mean 1.4, squares 9 + 25 + 6 - 10 *
    # 1.96 = 20.4, variance 20.4 / 9 = 2.266667, std 1.505545
    running = RunningMoments()
    running.update(torch.tensor([3.0, 5.0]))
    running.update(REWARDS)
    assert (running.count, running.mean) == (10, pytest.approx(1.4))
    assert running.std == pytest.approx(1.505545, abs=1e-6)
    # (1 - 1.4) / 1.505546 = -0.265684 and -1.4 / 1.505546 = -0.929895
    _close(_normalized("running", "running", running)[:2], -0.265684, -0.929895)


@pytest.mark.parametrize(
    ("coef", "kl", "target", "n", "horizon", "expected"),
    [
        (0.2, 6.0, 5.0, 512, 10_000.0, 0.202048),  # 0.2 * (1 + 0.2 * 0.0512)
        (0.2, 10.0, 5.0, 512, 10_000.0, 0.202048),  # a distance of 1 counts as 0.2
        (0.2, 0.2, 0.1, 10, 100.0, 0.204),  # 0.2 * (1 + 0.2 * 0.1)
        (0.2, 0.0, 0.1, 10, 100.0, 0.196),
        (0.2, 0.11, 0.1, 10, 100.0, 0.202),  # 0.2 * (1 + 0.1 * 0.1)
        (0.2, 0.0, 0.1, 1000, 100.0, 0.0),  # 1 - 0.2 * 10 would turn its sign around
    ],
)
def test_the_kl_coefficient_adapts_to_its_target(
    coef: float, kl: float, target: float, n: int, horizon: float, expected: float
) -> None:
    got = steered_coefficient(coef, kl, target=target, num_trajectories=n, horizon=horizon)
    assert got == pytest.approx(expected, abs=1e-9)
