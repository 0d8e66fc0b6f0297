"""Gradients and limits of the policy loss, the value loss and the KL estimators."""

import math
from typing import get_args

import pytest
import torch

from braid.algorithms.kl import MAX_EXPONENT, kl_estimate
from braid.algorithms.policy_loss import LOG_RATIO_BOUND, importance_ratio, ppo_clip
from braid.algorithms.value_loss import value_loss
from braid.types import KlEstimator


def _ppo_gradient(ratios, advantages, **bounds):
    logprobs = torch.tensor(ratios).log().requires_grad_()
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None} | bounds
    ratio = importance_ratio(logprobs, torch.zeros(len(ratios)), None)
    loss, _ = ppo_clip(ratio, torch.tensor(advantages), **options)
    return torch.autograd.grad(loss.sum(), logprobs)[0]


def test_the_gradient_of_ppo_is_ratio_times_advantage_and_zero_where_clipping_binds():
    gradient = _ppo_gradient([1.0, 1.1, 1.5, 0.5, 1.5, 0.5], [2.0, 2.0, 2.0, 2.0, -2.0, -2.0])
    # loss falls with the ratio of good tokens up to 1.2, rises with that of bad ones down to 0.8
    expected = torch.tensor([-2.0, -2.2, 0.0, -1.0, 3.0, 0.0])
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)  # exp(log(x)) in float32


def test_the_dual_clip_takes_the_gradient_of_bad_tokens_beyond_it():
    gradient = _ppo_gradient([2.0, 4.0], [-1.0, -1.0], dual_clip=3.0)
    torch.testing.assert_close(gradient, torch.tensor([2.0, 0.0]), atol=1e-6, rtol=0)


def test_bounds_of_zero_still_let_the_first_step_learn():
    gradient = _ppo_gradient([1.0, 1.0], [1.0, -1.0], clip_low=0.0, clip_high=0.0)
    assert gradient.tolist() == [-1.0, 1.0]


def test_ratios_within_the_bound_are_exact():
    log_ratio = torch.tensor([LOG_RATIO_BOUND, -LOG_RATIO_BOUND], dtype=torch.float64)
    assert torch.equal(importance_ratio(log_ratio, torch.zeros(2).double(), None), log_ratio.exp())


@pytest.mark.parametrize("clamp", [None, 10.0])
@pytest.mark.parametrize("estimator", get_args(KlEstimator))
@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_any_gap_to_the_reference_gives_a_finite_kl_and_gradient(estimator, clamp, gap):
    logprobs = torch.tensor([gap], requires_grad=True)
    kl = kl_estimate(logprobs, torch.zeros(1), estimator=estimator, clamp=clamp)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    if clamp is not None:
        assert kl.abs().item() == clamp
        assert logprobs.grad.item() == 0


def test_k3_is_exact_up_to_its_bound():
    logprobs = torch.tensor([-MAX_EXPONENT, MAX_EXPONENT], dtype=torch.float64)
    kl = kl_estimate(logprobs, torch.zeros(2).double(), estimator="k3", clamp=None)
    expected = [math.expm1(MAX_EXPONENT) - MAX_EXPONENT, math.expm1(-MAX_EXPONENT) + MAX_EXPONENT]
    torch.testing.assert_close(kl, torch.tensor(expected).double())


def test_k3_of_nearly_equal_policies_keeps_its_digits():
    difference = torch.tensor([1e-3, -1e-3, 3e-4])
    kl = kl_estimate(difference, torch.zeros(3), estimator="k3", clamp=None)
    # d^2 / 2 to first order; float32 with expm1 has an error of about 6e-8 |d|, without it 6e-8, as large as
    # the value
    torch.testing.assert_close(kl, difference.square() / 2, atol=1e-10, rtol=1e-3)


def test_a_value_beyond_its_clip_learns_only_when_it_moved_away_from_the_return():
    values = torch.tensor([2.0, 2.0], requires_grad=True)
    value_loss(values, torch.ones(2), torch.tensor([3.0, 0.0]), clip=0.5).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 2.0]
