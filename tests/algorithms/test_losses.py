"""Gradients and limits of the policy loss, the value loss and the KL estimators."""

import math
from typing import get_args

import pytest
import torch
from tests.formulas import cispo, loss_of, ppo_clip

from braid.algorithms.advantages import ADVANTAGES
from braid.algorithms.kl import MAX_EXPONENT, kl_estimate
from braid.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from braid.algorithms.segments import segments
from braid.algorithms.surrogate import LOG_RATIO_BOUND, Tokens, importance_ratio
from braid.algorithms.value_loss import value_loss
from braid.types import KlEstimator

LOSSES = tuple(POLICY_LOSSES)


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


def _loss(loss: PolicyLoss, logprobs, old, advantages, chosen=0.0):
    ratio = importance_ratio(logprobs, old, None)
    tokens = Tokens(logprobs, old, advantages, ratio, torch.full_like(old, chosen))
    return loss.per_token(tokens)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("gap", [1e3, -1e3, 1e30])
def test_any_gap_between_policies_gives_a_finite_loss_and_gradient(name, divergence, gap):
    logprobs = torch.tensor([gap, gap], requires_grad=True)
    kind = loss_of(name, divergence=divergence)
    loss, diagnostics = _loss(kind, logprobs, torch.zeros(2), torch.tensor([1.0, -1.0]), chosen=1.0)
    loss.sum().backward()
    assert logprobs.grad is not None
    for tensor in (loss, logprobs.grad, *diagnostics.values()):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_that_are_certain_give_a_finite_loss_and_gradient(name):
    logprobs = torch.tensor([0.0, 0.0, -1e-9, -50.0], requires_grad=True)
    old = torch.tensor([0.0, -50.0, 0.0, 0.0])
    for divergence in ("tv", "kl"):
        loss, _ = _loss(
            loss_of(name, divergence=divergence), logprobs, old, torch.tensor([1.0, -1.0, 1.0, 1.0])
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", LOSSES)
def test_diagnostics_have_no_gradient_and_are_declared(name):
    kind = loss_of(name, dual_clip=3.0)
    loss, diagnostics = _loss(kind, torch.zeros(1, requires_grad=True), torch.zeros(1), torch.ones(1))
    assert loss.requires_grad
    assert not any(tensor.requires_grad for tensor in diagnostics.values())
    assert diagnostics.keys() == kind.metrics.keys()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cross_entropy", "kimi"}))
def test_tokens_with_zero_advantage_have_no_gradient(name):
    logprobs = torch.tensor([-0.5, -3.0], requires_grad=True)
    loss, _ = _loss(loss_of(name), logprobs, torch.tensor([-1.0, -1.0]), torch.zeros(2))
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


OTHER_VALUES = {
    "clip_low": 0.05,
    "clip_high": 0.02,
    "dual_clip": 1.5,
    "mask": True,
    "max_gap": 0.1,
    "tau": 0.7,
    "k_positive": 1.0,
    "lambda_positive": 1.0,
    "k_negative": 1.0,
    "lambda_negative": 1.0,
    "tau_positive": 3.0,
    "tau_negative": 3.0,
    "positive_weight": 0.5,
    "negative_weight": 0.5,
    "cov_coef": 3.0,
    "divergence": "kl",
}
BEFORE_THE_LOSS = {
    "ratio_level",
    "ratio_to",
    "log_ratio_min",
    "log_ratio_max",
    "cov_fraction",
    "cov_low",
    "cov_high",
}
"""Keys used where ratios are computed and tokens are selected."""


@pytest.mark.parametrize("name", LOSSES)
def test_every_key_of_a_loss_changes_it(name):
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(64, generator=generator)
    logprobs = old + 0.5 * torch.randn(64, generator=generator)
    advantages = torch.randn(64, generator=generator)
    chosen = 0.0 if name == "clip_cov" else 1.0  # it leaves out what is chosen
    base = {"clip_low": 0.12, "clip_high": 0.12}
    before, _ = _loss(loss_of(name, **base), logprobs, old, advantages, chosen)
    for key in POLICY_LOSSES[name].model_fields.keys() - BEFORE_THE_LOSS - {"kind"}:
        changed = loss_of(name, **base | {key: OTHER_VALUES[key]})
        assert not torch.equal(before, _loss(changed, logprobs, old, advantages, chosen)[0]), key


def test_a_kind_has_the_name_of_its_line():
    assert all(kind().kind == name for name, kind in (POLICY_LOSSES | ADVANTAGES).items())


def test_cispo_learns_where_ppo_has_stopped():
    logprobs = torch.tensor([0.5, -0.5], requires_grad=True)  # ratios 1.65 and 0.61, beyond both clips
    advantages = torch.tensor([1.0, -1.0])
    ratio = importance_ratio(logprobs, torch.zeros(2), None)
    clipped, _ = ppo_clip(ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=None)
    kept, _ = cispo(ratio, logprobs, advantages, clip_low=0.2, clip_high=0.2)
    (of_ppo,) = torch.autograd.grad(clipped.sum(), logprobs, retain_graph=True)
    (of_cispo,) = torch.autograd.grad(kept.sum(), logprobs)
    assert of_ppo.tolist() == [0.0, 0.0]
    torch.testing.assert_close(of_cispo, torch.tensor([-1.2, 0.8]))


def test_each_token_of_a_sequence_has_its_own_gradient():
    mask = torch.tensor([False, True, True, True])
    over = segments(mask, torch.zeros(4, dtype=torch.long))
    logprobs = torch.tensor([7.0, 0.2, 0.4, 0.0], requires_grad=True)
    ratio = importance_ratio(logprobs, torch.zeros(4), over)
    (ratio * torch.tensor([0.0, 1.0, -2.0, 0.0])).sum().backward()
    rho = math.exp(0.2)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, rho, -2 * rho, 0.0]))


def test_ratios_within_the_bound_are_exact():
    log_ratio = torch.tensor([LOG_RATIO_BOUND, -LOG_RATIO_BOUND], dtype=torch.float64)
    assert torch.equal(importance_ratio(log_ratio, torch.zeros(2).double(), None), log_ratio.exp())


@pytest.mark.parametrize("clamp", [None, 10.0])
@pytest.mark.parametrize("estimator", [name for name in get_args(KlEstimator) if not name.startswith("full")])
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
