"""Expected gradients of the algorithms, by enumeration, against the true gradients.

Everything that can be sampled is enumerated and weighted with its probability, so nothing here is random and
float64 rounding is the only error. J is the expected reward; a loss descends, so the gradient of a right loss
is -grad J.
"""

from itertools import product

import pytest
import torch
from tests.formulas import policy_gradient, ppo_clip
from torch import Tensor

from braid.algorithms.advantages.gae import gae
from braid.algorithms.advantages.grpo import group_advantages
from braid.algorithms.aggregate import aggregate, row_weights
from braid.algorithms.kl import kl_estimate
from braid.algorithms.surrogate import importance_ratio

EXACT = {"atol": 1e-12, "rtol": 0}  # float64, a few hundred terms of order 1
CONVERGED = {"atol": 1e-8, "rtol": 0}  # descent stops at 1e-10 in the gradient
CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}

LOGITS = torch.tensor([0.3, -0.5, 0.8, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.3, -0.7], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64).log()


def _gradient(scalar: Tensor, parameter: Tensor) -> Tensor:
    return torch.autograd.grad(scalar, parameter)[0]


def _true_gradient(logits: Tensor, rewards: Tensor = REWARDS) -> Tensor:
    logits = logits.detach().requires_grad_()
    return _gradient((logits.softmax(0) * rewards).sum(), logits)


def _expected(loss: Tensor, probabilities: Tensor) -> Tensor:
    """The mean of one-token losses, where loss i comes up with probability i."""
    return aggregate(loss, torch.ones_like(loss, dtype=torch.bool), probabilities.detach())


def _expected_grpo_loss(logits: Tensor, group_size: int, kl_penalty: float = 0.0) -> Tensor:
    """The expected GRPO loss over every group of `group_size` answers, with kl_penalty * k1 taken off the
    rewards."""
    logprobs = logits.log_softmax(0)
    answers = torch.tensor(list(product(range(len(logits)), repeat=group_size)))
    probabilities = logprobs.detach()[answers].sum(1).exp()
    taken = logprobs[answers.flatten()]
    kl = kl_estimate(taken.detach(), REFERENCE[answers.flatten()], estimator="k1", clamp=None)
    groups = torch.arange(len(answers)).repeat_interleave(group_size)
    advantages = group_advantages(
        REWARDS[answers.flatten()] - kl_penalty * kl, groups, normalize_by_std=False
    )
    loss, _ = ppo_clip(importance_ratio(taken, taken.detach(), None), advantages, **CLIP)
    weights = row_weights([1] * group_size, [0] * group_size, mode="token_mean", constant=None)
    return _expected(loss, torch.outer(probabilities, torch.tensor(weights, dtype=torch.float64)).flatten())


def _expected_ppo_loss(logits: Tensor, rewards: Tensor = REWARDS, value: float = 0.4) -> Tensor:
    """The expected PPO loss over every answer, with GAE on a critic that says `value`."""
    logprobs, n = logits.log_softmax(0), len(logits)
    one_token_each, terminal = (1,) * n, torch.zeros(n).double()
    advantages, _ = gae(
        rewards,
        torch.full_like(rewards, value),
        torch.ones(n).bool(),
        one_token_each,
        terminal,
        gamma=1.0,
        lam=1.0,
    )
    loss, _ = ppo_clip(importance_ratio(logprobs, logprobs.detach(), None), advantages, **CLIP)
    return _expected(loss, logprobs.exp())


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_grpo_without_std_follows_the_policy_gradient_times_g_minus_1_over_g(group_size):
    """Answer i's score S_i meets r_i (1 - 1/G) - sum_{j != i} r_j / G. The other answers are independent of
    it and E[S_i] = 0, so only (1 - 1/G) E[r_i S_i] = (G - 1) / G grad J is left."""
    logits = LOGITS.clone().requires_grad_()
    gradient = _gradient(_expected_grpo_loss(logits, group_size), logits)
    expected = -(group_size - 1) / group_size * _true_gradient(logits)
    torch.testing.assert_close(gradient, expected, **EXACT)


@pytest.mark.parametrize("value", [0.0, 0.4, -3.0])
def test_ppo_at_ratio_1_follows_the_policy_gradient_whatever_the_critic_says(value):
    logits = LOGITS.clone().requires_grad_()
    gradient = _gradient(_expected_ppo_loss(logits, value=value), logits)
    torch.testing.assert_close(gradient, -_true_gradient(logits), **EXACT)


def test_ppo_within_its_bounds_follows_the_gradient_of_the_new_policy_on_answers_of_the_old_one():
    """E_old[rho A] = sum_x pi(x) A(x), whose gradient is grad J as long as no ratio is clipped."""
    old = LOGITS.log_softmax(0)
    logits = (LOGITS + torch.tensor([0.05, -0.05, 0.02, 0.0]).double()).requires_grad_()
    loss, diagnostics = ppo_clip(importance_ratio(logits.log_softmax(0), old, None), REWARDS - 0.4, **CLIP)
    assert not diagnostics["clip_fraction"].any()
    torch.testing.assert_close(
        _gradient(_expected(loss, old.exp()), logits), -_true_gradient(logits), **EXACT
    )


def test_the_policy_gradient_loss_follows_the_policy_gradient():
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    gradient = _gradient(_expected(policy_gradient(logprobs, REWARDS)[0], logprobs.exp()), logits)
    torch.testing.assert_close(gradient, -_true_gradient(logits), **EXACT)


@pytest.mark.parametrize("lam", [1.0, 0.0])
def test_ppo_over_two_turns_with_environment_tokens_between_follows_the_policy_gradient(lam):
    """With lam = 1 for any critic; with lam = 0 when the critic is right."""
    rewards = torch.tensor([[1.0, -0.5], [0.2, 2.0]], dtype=torch.float64)
    first = torch.tensor([0.2, -0.4], dtype=torch.float64, requires_grad=True)
    second = torch.tensor([[0.5, 0.1], [-0.3, 0.6]], dtype=torch.float64, requires_grad=True)
    joint = first.softmax(0)[:, None] * second.softmax(1)
    expected = torch.autograd.grad(-(joint * rewards).sum(), (first, second))

    value_of_second = (second.softmax(1) * rewards).sum(1).detach()
    value_of_first = (first.softmax(0) * value_of_second).sum().detach()
    if lam == 1.0:
        value_of_second, value_of_first = value_of_second + 3.0, value_of_first - 5.0
    logprobs, values, gains = [], [], []
    for a, b in product(
        range(2), repeat=2
    ):  # an episode: the first choice, the environment's reply, the second
        logprobs += [first.log_softmax(0)[a], torch.zeros(()).double(), second.log_softmax(1)[a, b]]
        values += [value_of_first, torch.tensor(99.0).double(), value_of_second[a]]
        gains += [torch.zeros(()).double(), torch.zeros(()).double(), rewards[a, b]]
    mask = torch.tensor([True, False, True] * 4)
    advantages, _ = gae(
        torch.stack(gains), torch.stack(values), mask, (3,) * 4, torch.zeros(4).double(), gamma=1.0, lam=lam
    )
    packed = torch.stack(logprobs)
    loss, _ = ppo_clip(importance_ratio(packed, packed.detach(), None), advantages, **CLIP)
    total = aggregate(loss, mask, joint.detach().flatten().repeat_interleave(3))
    torch.testing.assert_close(torch.autograd.grad(total, (first, second)), expected, **EXACT)


def _reverse_kl(logprobs: Tensor) -> Tensor:
    return (logprobs.exp() * (logprobs - REFERENCE)).sum()


def _forward_kl(logprobs: Tensor) -> Tensor:
    return (REFERENCE.exp() * (REFERENCE - logprobs)).sum()


@pytest.mark.parametrize(
    ("estimator", "what_it_descends"),
    [
        ("k1", lambda logprobs: 0.0 * logprobs.sum()),
        ("k2", _reverse_kl),
        ("k3", _forward_kl),
        ("abs", lambda logprobs: (logprobs.exp() - REFERENCE.exp()).abs().sum()),
    ],
)
def test_each_estimator_in_the_loss_has_the_expected_gradient_that_its_docstring_states(
    estimator, what_it_descends
):
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    loss = _expected(kl_estimate(logprobs, REFERENCE, estimator=estimator, clamp=None), logprobs.exp())
    expected = _gradient(what_it_descends(logits.log_softmax(0)), logits)
    torch.testing.assert_close(_gradient(loss, logits), expected, **EXACT)


@pytest.mark.parametrize(
    ("estimator", "what_it_descends"),
    [("k1", _reverse_kl), ("k3", lambda logprobs: _reverse_kl(logprobs) - _forward_kl(logprobs))],
)
def test_each_estimator_in_the_reward_has_the_expected_gradient_that_its_docstring_states(
    estimator, what_it_descends
):
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    penalty = kl_estimate(logprobs.detach(), REFERENCE, estimator=estimator, clamp=None)
    loss = _expected(policy_gradient(logprobs, -penalty)[0], logprobs.exp())
    expected = _gradient(what_it_descends(logits.log_softmax(0)), logits)
    torch.testing.assert_close(_gradient(loss, logits), expected, **EXACT)


def test_the_full_kl_in_the_reward_has_no_gradient_at_its_own_token():
    """The same penalty for every token: only tokens before it learn from it."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    loss = _expected(policy_gradient(logprobs, -_reverse_kl(logprobs.detach()).expand(4))[0], logprobs.exp())
    torch.testing.assert_close(_gradient(loss, logits), torch.zeros(4).double(), **EXACT)


BETA = 0.5


def _train(loss_of) -> Tensor:
    """Descend the exact expected gradient from LOGITS until it vanishes; the policy's probabilities there."""
    logits = LOGITS.clone().requires_grad_()
    for _ in range(2000):
        gradient = _gradient(loss_of(logits), logits)
        if gradient.abs().max() < 1e-10:
            return logits.detach().softmax(0)
        logits = (logits.detach() - 4.0 * gradient).requires_grad_()
    raise AssertionError(f"did not converge: the gradient is still {gradient}")


def _kl_loss(logits: Tensor, estimator) -> Tensor:
    logprobs = logits.log_softmax(0)
    return BETA * _expected(kl_estimate(logprobs, REFERENCE, estimator=estimator, clamp=None), logprobs.exp())


def _closed_form(rewards: Tensor = REWARDS) -> Tensor:
    """The maximiser of E[r] - beta KL(pi | ref)."""
    return (rewards / BETA + REFERENCE).softmax(0)


def test_a_bandit_with_kl_in_the_reward_converges_to_its_closed_form_under_ppo():
    def loss(logits):
        kl = kl_estimate(logits.detach().log_softmax(0), REFERENCE, estimator="k1", clamp=None)
        return _expected_ppo_loss(logits, rewards=REWARDS - BETA * kl)

    torch.testing.assert_close(_train(loss), _closed_form(), **CONVERGED)


@pytest.mark.slow
def test_a_bandit_with_kl_in_the_reward_converges_to_its_closed_form_under_grpo():
    policy = _train(lambda logits: _expected_grpo_loss(logits, group_size=2, kl_penalty=BETA))
    torch.testing.assert_close(policy, _closed_form(), **CONVERGED)


def test_a_bandit_with_k2_in_the_loss_converges_to_its_closed_form_under_ppo():
    policy = _train(lambda logits: _expected_ppo_loss(logits) + _kl_loss(logits, "k2"))
    torch.testing.assert_close(policy, _closed_form(), **CONVERGED)


def test_a_bandit_with_k2_in_the_loss_weighs_rewards_by_g_minus_1_over_g_under_grpo():
    policy = _train(lambda logits: _expected_grpo_loss(logits, group_size=2) + _kl_loss(logits, "k2"))
    torch.testing.assert_close(policy, _closed_form(REWARDS / 2), **CONVERGED)


def test_a_bandit_with_k3_in_the_loss_converges_to_the_optimum_of_the_forward_kl():
    """The maximiser of E[r] - beta KL(ref | pi): pi(x) = beta ref(x) / (c - r(x)), so that c is the same for
    every x."""
    policy = _train(lambda logits: _expected_ppo_loss(logits) + _kl_loss(logits, "k3"))
    constants = REWARDS + BETA * REFERENCE.exp() / policy
    torch.testing.assert_close(
        constants, constants.mean().expand(4), atol=1e-7, rtol=0
    )  # as CONVERGED, over pi
    assert not torch.allclose(policy, _closed_form(), atol=0.01)
