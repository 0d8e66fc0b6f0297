"""Advantages against numbers worked out by hand."""

import pytest
import torch

from braid.algorithms.advantages.gae import gae
from braid.algorithms.advantages.grpo import group_advantages
from braid.algorithms.advantages.whitening import whiten

CLOSE = {"atol": 1e-6, "rtol": 0}  # expectations are given to six digits


def test_group_advantages_without_std_are_rewards_minus_the_group_mean():
    rewards = torch.tensor([1.0, 4.0, 0.0, 2.0, 5.0])  # group 3: 1, 0, 5, mean 2; group 8: 4, 2, mean 3
    groups = torch.tensor([3, 8, 3, 8, 3])
    advantages = group_advantages(rewards, groups, normalize_by_std=False)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0, -2.0, -1.0, 3.0]), **CLOSE)


def test_group_advantages_with_std_divide_by_the_unbiased_std_plus_epsilon():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    # group 0: mean 1/2, variance 4 * 1/4 / 3 = 1/3, std 0.577350; 0.5 / 0.577351 = 0.866024
    expected = torch.tensor([0.866024, -0.866024, -0.866024, 0.866024, 0.0, 0.0, 0.0, 0.0])
    advantages = group_advantages(rewards, groups, normalize_by_std=True)
    torch.testing.assert_close(advantages, expected, **CLOSE)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        # delta = 0.4 - 0.2, 0.6 - 0.4, 1 - 0.6 = 0.2, 0.2, 0.4
        # and A = 0.2 + 0.95 * 0.58, 0.2 + 0.95 * 0.4, 0.4
        (1.0, 0.95, [0.751, 0.58, 0.4], [0.951, 0.98, 1.0]),
        # delta = 0.9 * 0.4 - 0.2, 0.9 * 0.6 - 0.4, 1 - 0.6 = 0.16, 0.14, 0.4; decay 0.9 * 0.8 = 0.72
        # and A = 0.16 + 0.72 * 0.428, 0.14 + 0.72 * 0.4, 0.4
        (0.9, 0.8, [0.46816, 0.428, 0.4], [0.66816, 0.828, 1.0]),
        # lam = 0: A = delta
        (1.0, 0.0, [0.2, 0.2, 0.4], [0.4, 0.6, 1.0]),
        # gamma = lam = 1: returns are the reward to go
        (1.0, 1.0, [0.8, 0.6, 0.4], [1.0, 1.0, 1.0]),
    ],
)
def test_gae_equals_hand_computed_values(gamma, lam, advantages, returns):
    got = gae(
        torch.tensor([0.0, 0.0, 1.0]),
        torch.tensor([0.2, 0.4, 0.6]),
        torch.ones(3, dtype=torch.bool),
        (3,),
        torch.zeros(1),
        gamma=gamma,
        lam=lam,
    )
    torch.testing.assert_close(got, (torch.tensor(advantages), torch.tensor(returns)), **CLOSE)


def test_gae_bootstraps_a_row_that_was_cut_short_and_keeps_rows_apart():
    # Row 0, cut, value 8 after it: delta = 1 + 0.5 * 4 - 1, 2 + 0.5 * 8 - 4 = 2, 2; A = 2 + 0.25 * 2, 2
    # Row 1, terminal: delta = 3 - 1 = 2
    advantages, returns = gae(
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([1.0, 4.0, 1.0]),
        torch.ones(3, dtype=torch.bool),
        (2, 1),
        torch.tensor([8.0, 0.0]),
        gamma=0.5,
        lam=0.5,
    )
    torch.testing.assert_close(advantages, torch.tensor([2.5, 2.0, 2.0]), **CLOSE)
    torch.testing.assert_close(returns, torch.tensor([3.5, 6.0, 3.0]), **CLOSE)


def test_whitening_gives_mean_0_and_unbiased_variance_1_over_the_mask():
    # 1 and 3: mean 2, variance 2, so -+1 / sqrt(2); the 100 is not the policy's
    whitened = whiten(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]))
    torch.testing.assert_close(whitened, torch.tensor([-0.707107, 0.0, 0.707107]), **CLOSE)
