"""Advantages against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from braid.algorithms.advantages.gae import gae
from braid.algorithms.advantages.gdpo import Gdpo, decoupled_advantages
from braid.algorithms.advantages.grpo import group_advantages
from braid.algorithms.advantages.round import Round
from braid.algorithms.advantages.whitening import whiten
from braid.types import Row

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


def test_decoupled_advantages_normalise_each_part_before_the_sum():
    # Group 0, parts a and b of weights 1 and -2, and what is left of the reward, 0.5 for the last answer:
    # a: 1, 0, 1, mean 2/3, unbiased variance 1/3, std 0.577350: 0.577350, -1.154701, 0.577350
    # b: 4, 2, 0, mean 2, std 2: 1, 0, -1, times -2
    # left: 0, 0, 0.5, mean 1/6, variance (1/36 + 1/36 + 4/36) / 2 = 1/12, std 0.288675: -0.577350 twice, 1.154701
    # Group 1: a equal, so 0; b: 1, 0, std 0.707107: 0.707107, -0.707107, times -2
    scores = {"a": torch.tensor([1.0, 0.0, 1.0, 3.0, 3.0]), "b": torch.tensor([4.0, 2.0, 0.0, 1.0, 0.0])}
    rewards = scores["a"] - 2 * scores["b"] + torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0])
    groups = torch.tensor([0, 0, 0, 1, 1])
    got = decoupled_advantages(rewards.double(), scores, {"a": 1.0, "b": -2.0}, groups)
    expected = torch.tensor([-2.0, -1.732051, 3.732051, -1.414214, 1.414214], dtype=torch.float64)
    torch.testing.assert_close(got, expected, **CLOSE)


def test_a_run_decouples_the_parts_of_its_rewards():
    # (right, short): the sums 1 and 1 are equal in grpo, but each part distinguishes the answers.
    parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 0.5}, {"right": 0.0, "short": 0.0}]
    rows = [
        Row(
            {}, np.array([False, True]), 0, i, reward_parts=scores,
            fields={"rewards": np.array([0.0, scores["right"] + 2 * scores["short"]])},
        )
        for i, scores in enumerate(parts)
    ]  # fmt: skip
    advantage = Gdpo().of_parts({"right": 1.0, "short": 2.0})
    # right: mean 1/3, std 0.577350: 1.154701, -0.577350 twice; short the same for the second, times 2
    expected = torch.tensor([0.0, 0.0, 0.0, 1.732051, 0.0, -1.732051], dtype=torch.float64)
    torch.testing.assert_close(advantage.compute(Round.of(rows)), expected, **CLOSE)
    assert Gdpo(weights={"right": 3.0}).of_parts({"right": 1.0}).weights == {"right": 3.0}


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
