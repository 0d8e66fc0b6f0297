"""Properties of reward statistics for any numbers."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.algorithms.rewards import RunningMoments, reward_statistics
from braid.types import RewardStatistics

STATISTICS = get_args(RewardStatistics)
finite = st.floats(-100, 100, width=32)


@given(values=st.lists(finite, min_size=1, max_size=30), data=st.data())
def test_running_moments_do_not_depend_on_how_values_are_cut_into_rounds(values, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    running, at_once = RunningMoments(), RunningMoments()
    for begin, end in zip([0, *cuts], [*cuts, len(values)], strict=True):
        running.update(torch.tensor(values[begin:end]))
    at_once.update(torch.tensor(values))
    assert running.count == len(values)
    # float64 rounding of sums of at most 30 squares of at most 200
    assert running.mean == pytest.approx(at_once.mean, abs=1e-10)
    assert running.squares == pytest.approx(at_once.squares, abs=1e-7)


def test_running_moments_resume_from_their_state():
    running, other = RunningMoments(), RunningMoments()
    running.update(torch.tensor([0.1, 0.7]))
    other.load(running.state())
    for moments in (running, other):
        moments.update(torch.tensor([0.3, -2.0]))
    assert running == other


@given(reward=finite, count=st.integers(1, 9))
def test_equal_rewards_have_a_running_deviation_of_exactly_0(reward, count):
    running = RunningMoments()
    for _ in range(3):
        running.update(torch.full((count,), reward / 3))
    assert running.std == 0


@pytest.mark.slow
@pytest.mark.parametrize("mean", STATISTICS)
@pytest.mark.parametrize("std", STATISTICS)
@given(rewards=st.lists(finite, min_size=1, max_size=12), data=st.data())
def test_every_mix_follows_the_rows_and_stays_finite(mean, std, rewards, data):
    groups = data.draw(st.lists(st.integers(-3, 3), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    r, g, permuted = torch.tensor(rewards), torch.tensor(groups), torch.tensor(order)
    running = RunningMoments()
    running.update(r)
    center, scale = reward_statistics(r, g, mean=mean, std=std, running=running, sources=g % 2)
    assert torch.isfinite(center).all()
    assert (scale > 0).all()
    sources = g[permuted] % 2
    moved = reward_statistics(r[permuted], g[permuted], mean=mean, std=std, running=running, sources=sources)
    # float64 sums in another order
    torch.testing.assert_close(moved[0], center[permuted], atol=1e-10, rtol=0)
    torch.testing.assert_close(moved[1], scale[permuted], atol=1e-7, rtol=1e-7)


@given(rewards=st.lists(finite, min_size=2, max_size=12))
def test_centred_and_scaled_rewards_of_a_batch_have_mean_0_and_variance_1(rewards):
    r = torch.tensor(rewards).double()
    center, scale = reward_statistics(
        r, torch.zeros(len(r)).long(), mean="batch", std="batch", running=RunningMoments()
    )
    normalized = (r - center) / scale
    assert abs(float(normalized.mean())) < 1e-6  # rounding of rewards up to 100, by 1e-6 at least
    deviation = float(r.std())
    if deviation > 1e-3:
        assert float(normalized.std()) == pytest.approx(1.0, rel=1e-6 / deviation + 1e-9)
