"""Properties of advantages and whitening for any numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.algorithms.advantages.gae import gae
from braid.algorithms.advantages.grpo import group_advantages
from braid.algorithms.advantages.maxrl import likelihood_advantages
from braid.algorithms.advantages.raft import best_of_group
from braid.algorithms.advantages.reinforce import discounted_returns
from braid.algorithms.advantages.rloo import leave_one_out_advantages
from braid.algorithms.advantages.whitening import whiten

finite = st.floats(-100, 100, width=32)


def _gae_by_definition(rewards, values, mask, lengths, bootstrap, gamma, lam):
    """The paper's recursion, one position at a time."""
    advantages, returns, start = [0.0] * len(rewards), [0.0] * len(rewards), 0
    for length, last_value in zip(lengths, bootstrap, strict=True):
        advantage, next_value = 0.0, last_value
        for t in reversed(range(start, start + length)):
            if mask[t]:
                advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * advantage
                advantages[t], returns[t], next_value = advantage, advantage + values[t], values[t]
        start += length
    return torch.tensor([advantages, returns], dtype=torch.float64)


@given(data=st.data(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_equals_the_recursion_on_ragged_rows_with_environment_tokens(data, gamma, lam):
    lengths = data.draw(st.lists(st.integers(0, 12), max_size=5))
    total = sum(lengths)
    rewards, values = (data.draw(st.lists(finite, min_size=total, max_size=total)) for _ in range(2))
    mask = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    bootstrap = data.draw(st.lists(finite, min_size=len(lengths), max_size=len(lengths)))
    got = gae(
        torch.tensor(rewards).double(),
        torch.tensor(values).double(),
        torch.tensor(mask, dtype=torch.bool),
        tuple(lengths),
        torch.tensor(bootstrap).double(),
        gamma=gamma,
        lam=lam,
    )
    expected = _gae_by_definition(rewards, values, mask, lengths, bootstrap, gamma, lam)
    # float64; the scan adds in another order, over at most 12 terms of at most 400
    torch.testing.assert_close(torch.stack(got), expected, atol=1e-10, rtol=1e-12)


def test_gae_over_environment_tokens_equals_gae_without_them():
    rewards, values = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.2, 0.4, 0.6])
    plain = gae(rewards, values, torch.ones(3).bool(), (3,), torch.zeros(1), gamma=0.9, lam=0.8)
    mask = torch.tensor([False, True, True, False, False, True, False])
    nan = torch.full((7,), torch.nan)  # what lies outside the mask is not read
    spread = gae(
        nan.masked_scatter(mask, rewards),
        nan.masked_scatter(mask, values),
        mask,
        (7,),
        torch.zeros(1),
        gamma=0.9,
        lam=0.8,
    )
    for with_gaps, without in zip(spread, plain, strict=True):
        assert torch.equal(with_gaps[mask], without)
        assert torch.equal(with_gaps[~mask], torch.zeros(4))


def test_a_row_is_independent_of_its_neighbours():
    def run(first_row):
        rewards = torch.tensor([*first_row, 1.0, 2.0])
        return gae(
            rewards,
            rewards,
            torch.ones(5).bool(),
            (3, 2),
            torch.tensor([first_row[0], 0.0]),
            gamma=1.0,
            lam=1.0,
        )[0][3:]

    assert torch.equal(run([1.0, 2.0, 3.0]), run([1e6, -1e6, 7.0]))


def test_a_long_row_of_float32_keeps_its_digits():
    torch.manual_seed(1)
    n = 100_000
    rewards, values = torch.rand(n), torch.rand(n)
    mask = torch.rand(n) < 0.9
    advantages, _ = gae(rewards, values, mask, (n,), torch.zeros(1), gamma=1.0, lam=1.0)
    expected = _gae_by_definition(rewards.tolist(), values.tolist(), mask.tolist(), (n,), (0.0,), 1.0, 1.0)[0]
    # one rounding to float32 of sums up to 5e4 (half a unit in the last place: 2^-24), no matter how long the
    # row
    torch.testing.assert_close(advantages.double(), expected, atol=1e-7, rtol=2**-23)


@pytest.mark.parametrize("normalize_by_std", [True, False])
@given(rewards=st.lists(finite, min_size=1, max_size=12), data=st.data())
def test_group_advantages_sum_to_zero_in_each_group_and_follow_the_rows(normalize_by_std, rewards, data):
    groups = data.draw(st.lists(st.integers(-3, 3), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    r, g, permuted = torch.tensor(rewards).double(), torch.tensor(groups), torch.tensor(order)
    advantages = group_advantages(r, g, normalize_by_std=normalize_by_std)
    for group in set(groups):
        # float64 rounding of rewards up to 100, enlarged by at most 1 / epsilon = 1e6 where a group hardly
        # varies
        assert abs(float(advantages[g == group].sum())) < (1e-6 if normalize_by_std else 1e-11)
    moved = group_advantages(r[permuted], g[permuted], normalize_by_std=normalize_by_std)
    torch.testing.assert_close(moved, advantages[permuted], atol=1e-6, rtol=0)


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(reward=finite, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_groups_of_one_and_groups_of_equal_rewards_get_exactly_zero(normalize_by_std, dtype, reward, sizes):
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rewards = torch.full((sum(sizes),), reward / 3, dtype=dtype)
    advantages = group_advantages(rewards, groups, normalize_by_std=normalize_by_std)
    assert torch.equal(advantages, torch.zeros_like(rewards))


@pytest.mark.parametrize(
    "advantages_of",
    [leave_one_out_advantages, likelihood_advantages, best_of_group],
    ids=lambda f: f.__name__,
)
@given(rewards=st.lists(finite, min_size=1, max_size=12), data=st.data())
def test_comparisons_within_groups_follow_the_rows_and_ignore_other_groups(advantages_of, rewards, data):
    groups = data.draw(st.lists(st.integers(-3, 3), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    r, g, permuted = torch.tensor(rewards).double(), torch.tensor(groups), torch.tensor(order)
    advantages = advantages_of(r, g)
    moved = advantages_of(r[permuted], g[permuted])
    if advantages_of is best_of_group:  # which of equals is first is the order's
        best = [int(x) for x in g[permuted][moved > 0]]
        assert sorted(best) == sorted(int(x) for x in g[advantages > 0])
        assert torch.equal(r[permuted][moved > 0].sort().values, r[advantages > 0].sort().values)
    else:
        # float64 rounding of rewards up to 100, enlarged by at most 1 / epsilon = 1e6
        torch.testing.assert_close(moved, advantages[permuted], atol=1e-6, rtol=1e-9)
    for group in set(groups):
        alone = advantages_of(r[g == group], g[g == group])
        torch.testing.assert_close(alone, advantages[g == group], atol=1e-6, rtol=1e-9)


@given(rewards=st.lists(finite, min_size=2, max_size=9))
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards):
    r = torch.tensor(rewards).double()
    others = torch.stack([torch.cat([r[:i], r[i + 1 :]]).mean() for i in range(len(r))])
    advantages = leave_one_out_advantages(r, torch.zeros(len(r)).long())
    torch.testing.assert_close(advantages, r - others, atol=1e-10, rtol=0)  # float64, sums of 9


@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=12))
def test_likelihood_advantages_sum_to_zero_and_are_finite(rewards):
    advantages = likelihood_advantages(torch.tensor(rewards).double(), torch.zeros(len(rewards)).long())
    assert abs(float(advantages.sum())) < 1e-10  # float64, at most 12 terms of at most 12
    assert (advantages == 0).all() == (len(set(rewards)) == 1)


@given(data=st.data(), gamma=st.floats(0, 1))
def test_returns_are_gae_without_values(data, gamma):
    lengths = data.draw(st.lists(st.integers(0, 12), max_size=5))
    total = sum(lengths)
    rewards = torch.tensor(data.draw(st.lists(finite, min_size=total, max_size=total))).double()
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)), dtype=torch.bool)
    zeros, terminal = torch.zeros(total).double(), torch.zeros(len(lengths)).double()
    expected, _ = gae(rewards, zeros, mask, tuple(lengths), terminal, gamma=gamma, lam=1.0)
    returns = discounted_returns(rewards.masked_fill(~mask, torch.nan), mask, tuple(lengths), gamma=gamma)
    torch.testing.assert_close(returns, expected, atol=1e-12, rtol=1e-12)  # the same sums


@given(values=st.lists(finite, max_size=12), data=st.data())
def test_whitening_does_not_depend_on_order_or_on_masked_values(values, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    order = torch.tensor(data.draw(st.permutations(range(len(values)))), dtype=torch.long)
    a, m = torch.tensor(values).double(), torch.tensor(mask, dtype=torch.bool)
    whitened = whiten(a, m)
    assert torch.equal(whitened[~m], torch.zeros_like(a[~m]))
    # variance epsilon 1e-8: rounding of values up to 100 (1e-14) is enlarged by 1e4 at most
    torch.testing.assert_close(whiten(a[order], m[order]), whitened[order], atol=1e-9, rtol=0)
    assert torch.equal(whiten(a.masked_fill(~m, torch.nan), m), whitened)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_advantages_whiten_to_exactly_zero(count):
    whitened = whiten(torch.full((count,), 0.1), torch.ones(count, dtype=torch.bool))
    assert torch.equal(whitened, torch.zeros(count))


def test_no_rows_give_no_advantages():
    empty, nothing = torch.empty(0), torch.empty(0, dtype=torch.bool)
    assert gae(empty, empty, nothing, (), empty, gamma=1.0, lam=1.0)[0].shape == (0,)
    groups = torch.empty(0, dtype=torch.long)
    assert group_advantages(empty, groups, normalize_by_std=True).shape == (0,)
    for advantages_of in (leave_one_out_advantages, likelihood_advantages, best_of_group):
        assert advantages_of(empty, groups).shape == (0,)
    assert discounted_returns(empty, nothing, (), gamma=1.0).shape == (0,)
    assert whiten(empty, nothing).shape == (0,)
