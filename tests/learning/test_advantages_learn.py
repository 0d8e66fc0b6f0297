"""Expected gradients of advantages with a closed form, by enumeration, and a task that each of them learns.

Everything that can be sampled is enumerated there, so float64 rounding is the only error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from tests.formulas import changed
from torch import Tensor

from braid.algorithms.advantages.grpo import group_advantages
from braid.algorithms.advantages.maxrl import likelihood_advantages
from braid.algorithms.advantages.raft import best_of_group
from braid.algorithms.advantages.remax import baseline_advantages
from braid.algorithms.advantages.rloo import leave_one_out_advantages
from braid.algorithms.recipes import RECIPES, Recipe
from braid.algorithms.rewards import RunningMoments
from braid.models.batch import PackedBatch
from braid.training.advantages import compute_advantages
from braid.training.losses import policy_loss
from braid.types import Row

EXACT = {"atol": 1e-12, "rtol": 0}  # float64, a few hundred terms of order 1
LOGITS = torch.tensor([0.3, -0.5, 0.8, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.3, -0.7], dtype=torch.float64)
PASSES = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)


def _gradient_of(value: Callable[[Tensor], Tensor]) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(value(logits.softmax(0)), logits)[0]


def _expected_gradient(
    group_size: int, advantages_of: Callable[[Tensor, Tensor], Tensor], rewards: Tensor = REWARDS
) -> Tensor:
    """E[mean over a group of A_i grad log pi(x_i)], over every group that can be drawn."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    answers = torch.tensor(list(product(range(len(logits)), repeat=group_size)))
    chance = logprobs.detach()[answers].sum(1).exp()
    groups = torch.arange(len(answers)).repeat_interleave(group_size)
    advantages = advantages_of(rewards[answers.flatten()], groups).view(-1, group_size)
    return torch.autograd.grad((chance * (advantages * logprobs[answers]).mean(1)).sum(), logits)[0]


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_rloo_follows_the_policy_gradient_for_groups_of_any_size(group_size: int) -> None:
    gradient = _expected_gradient(group_size, leave_one_out_advantages)
    torch.testing.assert_close(gradient, _gradient_of(lambda p: (p * REWARDS).sum()), **EXACT)


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_remax_follows_the_policy_gradient_for_groups_of_any_size(group_size: int) -> None:
    greedy = REWARDS[LOGITS.argmax()]
    gradient = _expected_gradient(group_size, lambda r, _: baseline_advantages(r, greedy.expand(len(r))))
    torch.testing.assert_close(gradient, _gradient_of(lambda p: (p * REWARDS).sum()), **EXACT)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_maxrl_follows_the_expansion_of_the_log_pass_rate_to_one_term_less_than_the_group(
    group_size: int,
) -> None:
    def expansion(p: Tensor) -> Tensor:
        failure = 1 - (p * PASSES).sum()
        return -sum((failure**k / k for k in range(1, group_size)), start=torch.zeros(()))

    gradient = _expected_gradient(group_size, likelihood_advantages, PASSES)
    # 1e-6 is added to a mean of 1 / group_size at least
    torch.testing.assert_close(gradient, _gradient_of(expansion), atol=1e-5, rtol=0)


def test_maxrl_of_two_is_grpo_of_two_without_its_deviation_but_for_a_constant() -> None:
    """A group of one success in two: +-1/2 against a mean of 1/2."""
    ours = _expected_gradient(2, likelihood_advantages, PASSES)
    plain = _expected_gradient(2, lambda r, g: group_advantages(r, g, normalize_by_std=False), PASSES)
    torch.testing.assert_close(ours, 2 * plain, atol=1e-5, rtol=0)  # 1e-6 beside 1/2, as above


def test_raft_follows_the_likelihood_of_what_wins_its_group() -> None:
    """sum_x P(x is the first best of three, and not all are alike) grad log pi(x) / 3."""
    pi = LOGITS.softmax(0)
    wins = torch.zeros(4).double()
    for drawn in product(range(4), repeat=3):
        if len({float(REWARDS[x]) for x in drawn}) > 1:
            wins[max(drawn, key=lambda x: float(REWARDS[x]))] += pi[list(drawn)].prod()
    expected = _gradient_of(lambda p: (wins * p.log()).sum() / 3)
    torch.testing.assert_close(_expected_gradient(3, best_of_group), expected, **EXACT)


# --- a task of two choices, learned with the credit and the loss that training composes ---

NUM_GROUPS, GROUP_SIZE, NUM_ROUNDS = 8, 8, 80
SIZE = 3
"""Choices at each turn. The environment answers the first with a token that tells which it was."""

AT_ONCE = (torch.tensor([0.0, 0.5, 1.0]), torch.tensor([[0.0, 0.5, 1.0]]).expand(SIZE, -1))
"""Each turn is rewarded for itself."""
DELAYED = (torch.zeros(SIZE), torch.tensor([[0.0, 0.4, 0.0], [0.4, 0.0, 0.0], [0.0, 0.0, 1.0]]))
"""Only the second turn is rewarded, for what fits the first."""

GRPO = RECIPES["grpo"]
FAMILIES: dict[str, Recipe] = {
    "grpo": GRPO,
    "grpo without deviation": RECIPES["dr_grpo"],
    "grpo of turns": replace(GRPO, advantage=changed(GRPO.advantage, level="turn")),
    "reinforce": RECIPES["reinforce"],
    "reinforce, discounted": replace(
        RECIPES["reinforce"], advantage=changed(RECIPES["reinforce"].advantage, gamma=0.9)
    ),
    "reinforce++": RECIPES["reinforce_pp"],
    "reinforce++ with a baseline": RECIPES["reinforce_pp_baseline"],
    "lite ppo": RECIPES["lite_ppo"],
    "running statistics": replace(RECIPES["reinforce"], reward_mean="running", reward_std="running"),
    "gae without values": replace(
        RECIPES["ppo"], advantage=changed(RECIPES["ppo"].advantage, gamma=0.9, gae_lambda=0.9)
    ),
    "whitened rewards": replace(RECIPES["reinforce"], whiten_rewards=True),
    "whitened and clipped": replace(RECIPES["reinforce_pp"], advantage_clip=1.0),
    "rloo": RECIPES["rloo"],
    "remax": RECIPES["remax"],
    "raft": RECIPES["raft"],
    "maxrl": RECIPES["maxrl"],
    "gigpo": RECIPES["gigpo"],
    "gigpo by turns alone": replace(
        RECIPES["gigpo"], advantage=changed(RECIPES["gigpo"].advantage, episode_weight=0.0)
    ),
    "topr": RECIPES["topr"],
}
MYOPIC = {"grpo of turns"}
"""Advantages of turn rewards instead of returns ignore later rewards."""


def _learn(recipe: Recipe, rewards: tuple[Tensor, Tensor]) -> float:
    """The policy's probability of the best two choices, after some rounds of one step each."""
    recipe = replace(recipe, aggregation="token_mean")
    first, second = torch.zeros(SIZE, requires_grad=True), torch.zeros(SIZE, SIZE, requires_grad=True)
    generator, running = torch.Generator().manual_seed(0), RunningMoments()
    for _ in range(NUM_ROUNDS):
        a = torch.multinomial(first.softmax(0).detach(), NUM_GROUPS * GROUP_SIZE, True, generator=generator)
        b = torch.multinomial(second.softmax(1).detach()[a], 1, generator=generator).flatten()
        best = int(first.argmax())
        greedy = float(rewards[0][best] + rewards[1][best, int(second[best].argmax())])
        rows = [
            _row(i, int(a[i]), int(b[i]), float(rewards[0][a[i]]), float(rewards[1][a[i], b[i]]), greedy)
            for i in range(len(a))
        ]
        compute_advantages(rows, recipe, running=running)
        nothing = torch.zeros(len(rows))
        logprobs = torch.stack([nothing, first.log_softmax(0)[a], nothing, second.log_softmax(1)[a, b]], 1)
        outputs = {"logprobs": logprobs.flatten(), "entropy": torch.zeros(4 * len(rows))}
        loss, _ = policy_loss(recipe).compute(outputs, _packed(rows))
        gradients = torch.autograd.grad(loss, (first, second))
        first, second = (
            (x.detach() - 2.0 * g).requires_grad_() for x, g in zip((first, second), gradients, strict=True)
        )
    return float((first.softmax(0)[2] * second.softmax(1)[2, 2]).detach())


def _row(number: int, a: int, b: int, early: float, late: float, greedy: float) -> Row:
    return Row(
        {"input_ids": np.array([0, a, 10 + a, b])},
        np.array([False, True, False, True]),
        group=number // GROUP_SIZE,
        trajectory=number,
        baseline=greedy,
        decision=np.array([-1, 0, -1, 1], np.int32),
        fields={"rewards": np.array([0, early, 0, late], np.float32), "values": np.zeros(4, np.float32)},
    )


def _packed(rows: list[Row]) -> PackedBatch:
    fields = {"advantages": torch.from_numpy(np.concatenate([row.fields["advantages"] for row in rows]))}
    mask = torch.from_numpy(np.concatenate([row.mask for row in rows]))
    weights = torch.full((4 * len(rows),), 0.5 / len(rows))
    return PackedBatch({}, mask, (4,) * len(rows), fields, weights)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_two_turns_that_are_rewarded_at_once_are_learned(family: str) -> None:
    assert _learn(FAMILIES[family], AT_ONCE) > 0.8  # 1/9 at the start


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - MYOPIC))
def test_a_turn_that_pays_later_is_learned(family: str) -> None:
    assert _learn(FAMILIES[family], DELAYED) > 0.8


def test_rewards_of_turns_alone_do_not_teach_what_pays_later() -> None:
    assert _learn(FAMILIES["grpo of turns"], DELAYED) < 0.8
