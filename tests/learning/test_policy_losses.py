"""Expected gradients of the policy losses, by enumeration; each of them, composed as in training, solves a
bandit.

The policy is a softmax over four answers of one token. Expectations are sums over everything that can be
sampled, so float64 rounding is the only error there.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from tests.formulas import loss_of
from torch import Tensor

from braid.algorithms.corrections import correction_factor, sampling_weight
from braid.algorithms.policy_losses import POLICY_LOSSES
from braid.algorithms.recipes import RECIPES, Correction, Recipe
from braid.algorithms.segments import segments
from braid.algorithms.surrogate import Tokens, importance_ratio
from braid.training.losses import policy_loss
from braid.training.packing import pack
from braid.training.step_fields import write_step_fields
from braid.types import Row

EXACT = {"atol": 1e-12, "rtol": 0}  # float64, sums of a few terms of order 1
NAMES = tuple(POLICY_LOSSES)
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
GRPO = RECIPES["grpo"]

OLD = torch.tensor([0.3, -0.5, 0.8, 0.1], dtype=torch.float64)
NEAR = OLD + torch.tensor([0.05, -0.05, 0.02, 0.0], dtype=torch.float64)
FAR = OLD + torch.tensor([1.0, -0.8, 0.3, -0.6], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.3, -0.7], dtype=torch.float64)
ADVANTAGES = REWARDS - (OLD.softmax(0) * REWARDS).sum()


def _gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits)[0]


def _true_gradient(at: Tensor, weight: Tensor = ADVANTAGES) -> Tensor:
    """Of the expected reward; sum_x pi(x) weight(x) grad log pi(x)."""
    logits = at.clone().requires_grad_()
    return _gradient((logits.softmax(0) * weight).sum(), logits)


def _weighted_scores(at: Tensor, weights: Tensor) -> Tensor:
    """sum_x weights(x) grad log pi(x)."""
    logits = at.clone().requires_grad_()
    return _gradient((weights * logits.log_softmax(0)).sum(), logits)


def _expected_gradient(recipe: Recipe, at: Tensor, is_chosen: Tensor | None = None) -> Tensor:
    """Of the loss of one token, sampled from OLD, at the policy `at`."""
    logits, old = at.clone().requires_grad_(), OLD.log_softmax(0)
    logprobs = logits.log_softmax(0)
    chosen = torch.zeros_like(old) if is_chosen is None else is_chosen
    tokens = Tokens(logprobs, old, ADVANTAGES, importance_ratio(logprobs, old, None), chosen)
    loss, _ = recipe.policy_loss.per_token(tokens)
    return _gradient((old.exp() * loss).sum(), logits)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"cross_entropy"}))
def test_at_the_old_policy_every_loss_follows_the_policy_gradient(name: str) -> None:
    gradient = _expected_gradient(replace(GRPO, policy_loss=loss_of(name)), OLD)
    torch.testing.assert_close(gradient, -_true_gradient(OLD), **EXACT)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "clip_cov", "kl_cov", "dppo"])
def test_near_the_old_policy_losses_with_a_ratio_follow_the_gradient_of_the_new_policy(
    name: str,
) -> None:
    """E_old[rho A grad log pi] = E_pi[A grad log pi], while no bound binds."""
    gradient = _expected_gradient(replace(GRPO, policy_loss=loss_of(name, **CLIP)), NEAR)
    torch.testing.assert_close(gradient, -_true_gradient(NEAR), **EXACT)


def test_far_from_the_old_policy_cispo_keeps_every_token_with_a_bounded_weight() -> None:
    old, ratio = OLD.softmax(0), (FAR.log_softmax(0) - OLD.log_softmax(0)).exp()
    assert (ratio > 1.2).any()
    assert (ratio < 0.8).any()
    gradient = _expected_gradient(replace(GRPO, policy_loss=loss_of("cispo", **CLIP)), FAR)
    expected = -_weighted_scores(FAR, old * ratio.clamp(0.8, 1.2) * ADVANTAGES)
    torch.testing.assert_close(gradient, expected, **EXACT)


def test_far_from_the_old_policy_ppo_drops_tokens_that_moved_far_enough() -> None:
    old, ratio = OLD.softmax(0), (FAR.log_softmax(0) - OLD.log_softmax(0)).exp()
    keeps = torch.where(ADVANTAGES > 0, ratio < 1.2, ratio > 0.8)
    assert not keeps.all()
    expected = -_weighted_scores(FAR, old * ratio * ADVANTAGES * keeps)
    torch.testing.assert_close(_expected_gradient(GRPO, FAR), expected, **EXACT)


def test_sapos_gate_fades_as_its_docstring_says() -> None:
    recipe = replace(GRPO, policy_loss=loss_of("sapo", tau_positive=1.5, tau_negative=4.0))
    old, ratio = OLD.softmax(0), (FAR.log_softmax(0) - OLD.log_softmax(0)).exp()
    gate = torch.sigmoid(torch.where(ADVANTAGES > 0, 1.5, 4.0) * (ratio - 1))
    expected = -_weighted_scores(FAR, old * 4 * gate * (1 - gate) * ratio * ADVANTAGES)
    torch.testing.assert_close(_expected_gradient(recipe, FAR), expected, **EXACT)


def test_topr_truncates_the_ratio_of_bad_tokens_only() -> None:
    recipe = replace(GRPO, policy_loss=loss_of("topr", positive_weight=0.5, negative_weight=2.0))
    old, ratio = OLD.softmax(0), (FAR.log_softmax(0) - OLD.log_softmax(0)).exp()
    weight = torch.where(ADVANTAGES > 0, 0.5, 2.0 * ratio.clamp(max=1.0))
    expected = -_weighted_scores(FAR, old * weight * ADVANTAGES)
    torch.testing.assert_close(_expected_gradient(recipe, FAR), expected, **EXACT)


def test_clip_cov_follows_the_policy_gradient_of_the_other_tokens() -> None:
    is_chosen = torch.tensor([0.0, 1.0, 0.0, 0.0]).double()
    gradient = _expected_gradient(replace(GRPO, policy_loss=loss_of("clip_cov")), NEAR, is_chosen)
    expected = -_true_gradient(NEAR, ADVANTAGES * (1 - is_chosen))
    torch.testing.assert_close(gradient, expected, **EXACT)


def test_kl_cov_draws_chosen_tokens_back_to_where_they_were() -> None:
    is_chosen = torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    moved = (FAR.log_softmax(0) - OLD.log_softmax(0)).sign()
    gradient = _expected_gradient(replace(GRPO, policy_loss=loss_of("kl_cov", cov_coef=0.3)), FAR, is_chosen)
    penalty = _weighted_scores(FAR, OLD.softmax(0) * 0.3 * is_chosen * moved)
    torch.testing.assert_close(gradient, penalty - _true_gradient(FAR), **EXACT)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_drops_only_what_leaves_the_region_in_the_direction_of_its_advantage(divergence: str) -> None:
    bound = 0.1 if divergence == "tv" else 0.02
    loss = loss_of("dppo", divergence=divergence, clip_low=bound, clip_high=bound)
    recipe = replace(GRPO, policy_loss=loss)
    p, q = FAR.softmax(0), OLD.softmax(0)
    coin = (p - q).abs() if divergence == "tv" else q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    keeps = (coin <= bound) | ((p > q) != (ADVANTAGES > 0))
    assert 0 < keeps.sum() < 4
    torch.testing.assert_close(
        _expected_gradient(recipe, FAR), -_true_gradient(FAR, ADVANTAGES * keeps), **EXACT
    )


def test_cross_entropy_descends_the_forward_divergence_from_what_is_imitated() -> None:
    """grad E_old[-log pi] = pi - old, whatever the advantages."""
    gradient = _expected_gradient(replace(GRPO, policy_loss=loss_of("cross_entropy")), FAR)
    torch.testing.assert_close(gradient, FAR.softmax(0) - OLD.softmax(0), **EXACT)


# --- answers of two tokens, drawn independently from the same softmax ---

PAIRS = torch.tensor(list(product(range(4), repeat=2)))
PAIR_ROWS = torch.arange(16).repeat_interleave(2)
PAIR_ADVANTAGES = (REWARDS[PAIRS[:, 0]] - 0.5 * REWARDS[PAIRS[:, 1]]).repeat_interleave(2)


def test_the_ratio_of_a_sequence_has_the_gradient_of_its_geometric_mean() -> None:
    """The straight-through form and the plain one have one gradient: A and weight are the same over a
    sequence."""
    over = segments(torch.ones(32, dtype=torch.bool), PAIR_ROWS)
    old = OLD.log_softmax(0)[PAIRS.flatten()]
    weight = old.view(16, 2).sum(1).exp().repeat_interleave(2) / 2
    logits = FAR.clone().requires_grad_()
    ours = weight * importance_ratio(logits.log_softmax(0)[PAIRS.flatten()], old, over) * PAIR_ADVANTAGES
    gradient = _gradient(ours.sum(), logits)
    logits = FAR.clone().requires_grad_()
    mean = (logits.log_softmax(0)[PAIRS] - OLD.log_softmax(0)[PAIRS]).mean(1).exp()
    plain = _gradient((2 * weight[::2] * mean * PAIR_ADVANTAGES[::2]).sum(), logits)
    torch.testing.assert_close(gradient, plain, **EXACT)


@pytest.mark.parametrize(("level", "is_exact"), [("sequence", True), ("turn", True), ("geometric", False)])
def test_weights_of_whole_answers_make_the_samplers_expectation_that_of_the_old_policy(
    level: str, is_exact: bool
) -> None:
    """Sampled from FAR, trained from OLD: E_mu[w A grad log pi] = E_old[A grad log pi]."""
    over = segments(torch.ones(32, dtype=torch.bool), PAIR_ROWS)
    sampler, old = FAR.log_softmax(0)[PAIRS.flatten()], OLD.log_softmax(0)[PAIRS.flatten()]
    weight = sampling_weight(old, sampler, over, level=level)
    logits = OLD.clone().requires_grad_()
    surrogate = -weight * PAIR_ADVANTAGES * logits.log_softmax(0)[PAIRS.flatten()]
    chance = sampler.view(16, 2).sum(1).exp().repeat_interleave(2)
    gradient = _gradient((chance * surrogate).sum(), logits)
    logits = OLD.clone().requires_grad_()
    joint = logits.softmax(0)[PAIRS].prod(1)
    expected = -_gradient((joint * PAIR_ADVANTAGES[::2]).sum(), logits)
    assert torch.allclose(gradient, expected, **EXACT) == is_exact


def test_weights_of_tokens_correct_one_token_answers_exactly_and_masks_leave_the_rest_alone() -> None:
    sampler, old = FAR.log_softmax(0), OLD.log_softmax(0)
    weight = sampling_weight(old, sampler, None, level="token")
    for low, high in ((0.0, 100.0), (0.5, 1.5)):
        kept, _ = correction_factor(weight, mode="mask", low=low, high=high)
        truncated, _ = correction_factor(weight, mode="truncate", low=low, high=high)
        logits = OLD.clone().requires_grad_()
        loss = -(sampler.exp() * kept * truncated * ADVANTAGES * logits.log_softmax(0)).sum()
        is_kept = (weight >= low) & (weight <= high)
        expected = -_true_gradient(OLD, ADVANTAGES * is_kept)
        torch.testing.assert_close(_gradient(loss, logits), expected, **EXACT)
        assert is_kept.all() == (high == 100.0)


# --- a bandit, learned with the loss that training composes ---

NUM_SAMPLES, NUM_ROUNDS, STEPS_PER_ROUND = 64, 60, 2


def _learn(recipe: Recipe, sampler_shift: Tensor | None = None) -> Tensor:
    """The policy's probabilities after some rounds of sampled answers, two steps each, by plain gradient
    descent."""
    logits, generator = torch.zeros(4, requires_grad=True), torch.Generator().manual_seed(0)
    shift = torch.zeros(4) if sampler_shift is None else sampler_shift
    mask = np.array([False, True])
    for round_ in range(NUM_ROUNDS):
        sampler = (logits.detach() + shift).log_softmax(0)
        answers = torch.multinomial(sampler.exp(), NUM_SAMPLES, replacement=True, generator=generator)
        if recipe.policy_loss.kind == "cross_entropy":  # imitates what is kept
            answers = answers[answers == 0]
        old = logits.detach().log_softmax(0)[answers]
        rewards = REWARDS.float()[answers]
        rows = [
            Row({}, mask, group=0, trajectory=i, fields={k: np.float32([0, v]) for k, v in values.items()})
            for i in range(len(answers))
            for values in [
                {
                    "advantages": float(rewards[i] - rewards.mean()),
                    "old_logprobs": float(old[i]),
                    "behavior_logprobs": float(sampler[answers[i]]),
                    "is_success": float(rewards[i] >= 1.0),
                }
            ]
        ]
        for step in range(STEPS_PER_ROUND):
            write_step_fields(rows, recipe, constant=None, key=(0, round_, step))
            batch = pack(rows, torch.device("cpu"), weights=[1.0 / len(rows)] * len(rows))
            logprobs = torch.stack([torch.zeros(len(rows)), logits.log_softmax(0)[answers]], 1).flatten()
            outputs = {"logprobs": logprobs, "entropy": torch.zeros_like(logprobs)}
            loss, _ = policy_loss(recipe).compute(outputs, batch)
            (gradient,) = torch.autograd.grad(loss, logits)
            logits = (logits.detach() - gradient).requires_grad_()
    return logits.detach().softmax(0)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", pytest.param("sequence", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", NAMES)
def test_a_bandit_learns_its_best_answer(name: str, level: str) -> None:
    chosen = {"cov_low": 0.1, "cov_fraction": 0.05, "cov_coef": 0.1}
    recipe = replace(GRPO, policy_loss=loss_of(name, ratio_level=level, **CLIP, **chosen))
    assert _learn(recipe)[0] > 0.9  # 0.25 at the start


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "turn_geometric", "geometric"])
def test_a_bandit_learns_from_another_sampler(level: str) -> None:
    corrections = tuple(
        Correction(level=level, mode=mode, low=0.0, high=5.0) for mode in ("truncate", "mask")
    )
    shift = torch.tensor([-1.0, 1.0, 0.0, 0.5])
    assert _learn(replace(GRPO, corrections=corrections), shift)[0] > 0.9


def test_the_supervised_term_alone_learns_what_succeeds() -> None:
    assert _learn(replace(GRPO, policy_loss_coef=0.0, supervised_coef=1.0))[0] > 0.9
