"""The composition of losses against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from tests.formulas import advantage_of
from torch import Tensor

from braid.algorithms.policy_losses.kimi import Kimi
from braid.algorithms.policy_losses.masked_is import MaskedIs
from braid.algorithms.policy_losses.policy_gradient import PolicyGradient
from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.algorithms.recipes import RECIPES, Correction, Recipe
from braid.models.batch import PackedBatch
from braid.training.backend import Diagnostics
from braid.training.losses import policy_loss, supervised_loss, value_loss_of

GRPO = RECIPES["grpo"]
CLOSE = {"abs": 1e-6}  # exp and log in float32, of numbers near 1


def _batch(weight: float = 0.5, **fields: list[float]) -> PackedBatch:
    """Three positions, the first of which is context."""
    return PackedBatch(
        inputs={},
        mask=torch.tensor([False, True, True]),
        lengths=(3,),
        fields={name: torch.tensor([0.0, *values]) for name, values in fields.items()},
        weights=torch.full((3,), weight),
    )


def _outputs(logprobs: list[float]) -> dict[str, Tensor]:
    return {
        "logprobs": torch.tensor([0.0, *logprobs], requires_grad=True),
        "entropy": torch.tensor([0.0, 0.3, 0.5], requires_grad=True),
    }


def _means(diagnostics: Diagnostics) -> dict[str, float]:
    return {name: (total / count).item() for name, (total, count) in diagnostics.means.items()}


def _policy(recipe: Recipe, logprobs: list[float], **fields: list[float]) -> tuple[Tensor, dict, Diagnostics]:
    outputs = _outputs(logprobs)
    loss, diagnostics = policy_loss(recipe).compute(outputs, _batch(**fields))
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in outputs.items()}, diagnostics


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_that_of_the_policy() -> None:
    loss, grads, diagnostics = _policy(GRPO, [-1.0, -2.0], advantages=[2.0, -4.0])
    assert loss.item() == pytest.approx(0.5 * (-2.0 + 4.0))
    assert grads["logprobs"].tolist() == [0.0, -1.0, 2.0]
    assert grads["entropy"] is None
    means = _means(diagnostics)
    assert means["policy/ratio_mean"] == 1.0
    assert means["policy/clip_fraction"] == 0.0
    assert means["policy/entropy"] == pytest.approx(0.4)
    assert "policy/kl" not in means


def test_kl_in_the_loss_is_added_and_reported() -> None:
    recipe = replace(GRPO, kl_coef=0.1, kl_estimator="k2")
    loss, _, diagnostics = _policy(recipe, [-1.0, -2.0], advantages=[0.0, 0.0], ref_logprobs=[-3.0, -2.0])
    # k2: (2^2 / 2, 0), weighted 0.1 * 0.5; mean over the two positions
    assert loss.item() == pytest.approx(0.1 * 0.5 * 2.0)
    assert _means(diagnostics)["policy/kl"] == pytest.approx(1.0)


def test_the_full_kl_in_the_loss_is_the_models_own_up_to_the_clamp() -> None:
    recipe = replace(GRPO, kl_coef=0.1, kl_estimator="full", kl_clamp=3.0)
    loss = policy_loss(recipe)
    assert loss.outputs == {"logprobs", "entropy", "kl"}
    outputs = _outputs([-1.0, -2.0]) | {"kl": torch.tensor([0.0, 2.0, 4.0], requires_grad=True)}
    total, diagnostics = loss.compute(outputs, _batch(advantages=[0.0, 0.0]))
    total.backward()
    assert total.item() == pytest.approx(0.1 * 0.5 * (2.0 + 3.0))
    assert outputs["kl"].grad is not None
    torch.testing.assert_close(outputs["kl"].grad, torch.tensor([0.0, 0.05, 0.0]))
    assert _means(diagnostics)["policy/kl"] == pytest.approx(2.5)
    for unused in (replace(recipe, kl_in="reward"), replace(recipe, kl_coef=0.0)):
        assert policy_loss(unused).outputs == {"logprobs", "entropy"}


def test_kl_in_the_reward_is_reported_but_not_added() -> None:
    recipe = replace(GRPO, kl_coef=0.1, kl_in="reward")
    loss, _, diagnostics = _policy(recipe, [-1.0, -2.0], advantages=[0.0, 0.0], ref_logprobs=[-3.0, -2.0])
    assert loss.item() == 0.0
    assert "policy/kl" in diagnostics.means


def test_kl_in_the_loss_without_a_reference_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="KL in the loss needs ref_logprobs"):
        _policy(replace(GRPO, kl_coef=0.1), [-1.0, -2.0], advantages=[0.0, 0.0])


def test_the_entropy_bonus_is_subtracted_and_has_a_gradient() -> None:
    loss, grads, _ = _policy(replace(GRPO, entropy_coef=0.2), [-1.0, -2.0], advantages=[0.0, 0.0])
    assert loss.item() == pytest.approx(-0.2 * 0.5 * 0.8)
    assert grads["entropy"].tolist() == pytest.approx([0.0, -0.1, -0.1])


def test_versions_of_the_weights_interpolate_the_old_log_probs() -> None:
    """Sampled by versions 1 and 2, version 3 in training: old is behavior + 1/2 of the way, and behavior."""
    recipe = replace(GRPO, corrections=(Correction(level="token", mode="truncate", low=0.0, high=None),))
    outputs = _outputs([-1.0, -2.0])
    fields = {"advantages": [1.0, 1.0], "behavior_logprobs": [-1.2, -2.1], "policy_versions": [1.0, 2.0]}
    loss, diagnostics = policy_loss(recipe, version=3).compute(outputs, _batch(**fields))
    loss.backward()
    # weights e^0.1 and 1, ratios e^0.1 and e^0.1: 0.5 (1.221403 + 1.105171)
    assert loss.item() == pytest.approx(-1.163287, **CLOSE)
    assert outputs["logprobs"].grad is not None
    assert outputs["logprobs"].grad.tolist() == pytest.approx([0.0, -0.610701, -0.552585], **CLOSE)
    assert _means(diagnostics)["policy/correction_mean"] == pytest.approx((1.105171 + 1.0) / 2, **CLOSE)


# One row: a turn of two tokens, a token of the environment, a turn of one token.
TURNS = torch.tensor([-1, 0, 0, -1, 1], dtype=torch.int32)


def _of_turns(
    recipe: Recipe, weight: float, advantages: list[float], moved: list[float]
) -> tuple[float, list[float], list[float]]:
    """The loss and its gradients by log-probs and entropies. `moved` is log pi - log old of the three tokens,
    `weight` that of a token or turn; the entropies are 0.3, 0.5 and 0.2."""
    logprobs = torch.tensor([9.0, -1.0, -2.0, 9.0, -0.5], requires_grad=True)
    entropy = torch.tensor([9.0, 0.3, 0.5, 9.0, 0.2], requires_grad=True)
    away = torch.tensor([0.0, *moved[:2], 0.0, moved[2]])
    fields = {
        "old_logprobs": logprobs.detach() - away,
        "advantages": torch.tensor([9.0, *advantages[:2], 9.0, advantages[2]]),
    }
    batch = PackedBatch({}, TURNS >= 0, (5,), fields, torch.full((5,), weight), TURNS)
    loss, _ = policy_loss(recipe).compute({"logprobs": logprobs, "entropy": entropy}, batch)
    gradients = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)
    return loss.item(), *([] if g is None else g[TURNS >= 0].tolist() for g in gradients)


@pytest.mark.parametrize("level", ["action", "chunk"])
def test_log_probs_of_decisions_are_clipped_as_one_and_each_counts_once(
    level: Literal["action", "chunk"],
) -> None:
    recipe = replace(GRPO, logprob_level=level)
    # ratios e^0.2 = 1.221403, beyond 1.2, and e^-0.3 = 0.740818; neither token of the first is beyond 1.2 by
    # itself
    loss, gradient, _ = _of_turns(recipe, 0.5, [1.0, 1.0, 1.0], [0.1, 0.1, -0.3])
    assert loss == pytest.approx(-(1.2 + 0.740818) / 2, **CLOSE)
    assert gradient == pytest.approx([0.0, 0.0, -0.370409], **CLOSE)
    # with A < 0 the first is not clipped, and both of its tokens have the gradient of the sum
    loss, gradient, _ = _of_turns(recipe, 0.5, [-1.0, -1.0, 1.0], [0.1, 0.1, -0.3])
    assert loss == pytest.approx((1.221403 - 0.740818) / 2, **CLOSE)
    assert gradient == pytest.approx([0.610701, 0.610701, -0.370409], **CLOSE)


def test_equally_weighted_turns_have_the_mean_over_their_tokens() -> None:
    recipe = replace(GRPO, turn_weighting="turns")
    # ratios e^0.1 = 1.105171, clipped 1.2 for e^0.3, and 1: their mean in the first turn is 1.152585
    loss, gradient, _ = _of_turns(recipe, 0.5, [1.0, 1.0, 1.0], [0.1, 0.3, 0.0])
    assert loss == pytest.approx(-(1.152585 + 1.0) / 2, **CLOSE)
    assert gradient == pytest.approx([-1.105171 / 4, 0.0, -0.5], **CLOSE)


def test_losses_without_a_ratio_take_the_log_prob_of_a_decision_too() -> None:
    kimi = replace(GRPO, policy_loss=Kimi(tau=0.5), logprob_level="chunk")
    # -A log pi: 3 and 0.5; 0.5 / 2 times the square of 0.1 + 0.3, and of -0.2; gradients -1 + 0.5 * 0.4, -1 -
    # 0.5 * 0.2
    loss, gradient, _ = _of_turns(kimi, 0.5, [1.0, 1.0, 1.0], [0.1, 0.3, -0.2])
    assert loss == pytest.approx((3.0 + 0.5 + 0.25 * (0.16 + 0.04)) / 2, **CLOSE)
    assert gradient == pytest.approx([-0.4, -0.4, -0.55], **CLOSE)


@pytest.mark.parametrize(
    ("logprob_level", "weight", "bonus", "gradient"),
    [
        # mean over the two turns of 0.3 + 0.5 and 0.2
        ("chunk", 1 / 2, (0.8 + 0.2) / 2, [0.5, 0.5, 0.5]),
        # mean over the three tokens, each with the entropy of its turn
        ("token", 1 / 3, (0.8 + 0.8 + 0.2) / 3, [2 / 3, 2 / 3, 1 / 3]),
    ],
)
def test_the_entropy_of_a_decision_is_the_sum_over_its_tokens(
    logprob_level: Literal["token", "chunk"], weight: float, bonus: float, gradient: list[float]
) -> None:
    recipe = replace(GRPO, entropy_coef=0.1, entropy_level="chunk", logprob_level=logprob_level)
    loss, _, grads = _of_turns(recipe, weight, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert loss == pytest.approx(-0.1 * bonus, **CLOSE)
    assert grads == pytest.approx([-0.1 * g for g in gradient], **CLOSE)


def test_an_env_step_is_a_decision_so_its_level_changes_nothing() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    fields = {"old_logprobs": logprobs - 0.1, "advantages": torch.tensor([1.0, -1.0, 2.0])}
    mask, steps = torch.ones(3, dtype=torch.bool), torch.arange(3)
    batch = PackedBatch({}, mask, (3,), fields, torch.full((3,), 0.25), steps)
    outputs = {"logprobs": logprobs, "entropy": torch.tensor([0.3, 0.5, 0.2])}
    recipe = replace(GRPO, entropy_coef=0.1)
    of_steps = replace(recipe, logprob_level="chunk", entropy_level="action")
    assert policy_loss(of_steps).compute(outputs, batch)[0] == policy_loss(recipe).compute(outputs, batch)[0]


def test_ratios_and_clipping_are_measured_against_the_old_policy() -> None:
    old = [-1.0 - math.log(1.5), -2.0]
    loss, grads, diagnostics = _policy(GRPO, [-1.0, -2.0], advantages=[1.0, 1.0], old_logprobs=old)
    assert loss.item() == pytest.approx(-0.5 * (1.2 + 1.0))
    assert grads["logprobs"].tolist() == pytest.approx([0.0, 0.0, -0.5])
    means = _means(diagnostics)
    assert means["policy/ratio_mean"] == pytest.approx(1.25, **CLOSE)
    assert means["policy/clip_fraction"] == 0.5
    assert diagnostics.maxima["policy/ratio_max"].item() == pytest.approx(1.5, **CLOSE)


def test_the_mismatch_of_engine_and_trainer_is_measured_before_the_update() -> None:
    _, _, diagnostics = _policy(
        GRPO, [-9.0, -9.0], advantages=[0.0, 0.0], old_logprobs=[-1.0, -2.0], behavior_logprobs=[-1.5, -2.0]
    )
    assert diagnostics.maxima["policy/logprob_mismatch_max"].item() == 0.5
    # k3 of KL(engine | trainer) at a token 0.5 likelier in training: (e^0.5 - 1 - 0.5, 0)
    expected = (math.exp(0.5) - 1.5) / 2
    assert _means(diagnostics)["policy/logprob_mismatch_kl"] == pytest.approx(expected, **CLOSE)


def test_the_plain_policy_gradient_does_not_use_the_ratio_but_reports_it() -> None:
    recipe = replace(GRPO, policy_loss=PolicyGradient())
    loss, _, diagnostics = _policy(recipe, [-1.0, -2.0], advantages=[2.0, 1.0], old_logprobs=[-2.0, -3.0])
    assert loss.item() == pytest.approx(0.5 * (2.0 + 2.0))
    means = _means(diagnostics)
    assert means["policy/ratio_mean"] == pytest.approx(math.e, **CLOSE)
    assert means["policy/approx_kl"] == pytest.approx(math.e - 2.0, **CLOSE)
    assert "policy/clip_fraction" not in means


def test_the_kl_coefficient_may_be_another_than_the_recipes() -> None:
    recipe = replace(GRPO, kl_coef=0.1, kl_estimator="k2")
    batch = _batch(advantages=[0.0, 0.0], ref_logprobs=[-3.0, -2.0])
    loss, _ = policy_loss(recipe, kl_coef=0.4).compute(_outputs([-1.0, -2.0]), batch)
    assert loss.item() == pytest.approx(0.4 * 0.5 * 2.0)


def test_the_policy_loss_coefficient_weighs_surrogate_and_kl_but_not_entropy() -> None:
    recipe = replace(GRPO, policy_loss_coef=0.5, kl_coef=0.1, kl_estimator="k2", entropy_coef=0.2)
    loss, _, _ = _policy(recipe, [-1.0, -2.0], advantages=[2.0, -4.0], ref_logprobs=[-3.0, -2.0])
    # surrogate -2 + 4, KL 0.1 * 2, entropy 0.2 * 0.8; the row's weight is 0.5
    assert loss.item() == pytest.approx(0.5 * (0.5 * (2.0 + 0.2) - 0.16))


def _corrected(*corrections: Correction) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Log-probs of the sampler such that w = (2, 0.5)."""
    old = [-1.0, -2.0]
    behavior = [-1.0 - math.log(2.0), -2.0 + math.log(2.0)]
    loss, grads, diagnostics = _policy(
        replace(GRPO, corrections=corrections, kl_coef=0.1, kl_estimator="k2"),
        [-1.0, -2.0],
        advantages=[1.0, -3.0],
        old_logprobs=old,
        behavior_logprobs=behavior,
        ref_logprobs=[-1.0, -1.0],
    )
    return loss, grads, _means(diagnostics)


def test_a_correction_weighs_the_surrogate_and_nothing_else() -> None:
    loss, _, means = _corrected(Correction(level="token", mode="truncate", low=0.0, high=1.5))
    # surrogate -1 and 3, times 1.5 and 0.5; KL 0 and 1/2, times 0.1
    assert loss.item() == pytest.approx(0.5 * (-1.5 + 1.5 + 0.05), **CLOSE)
    assert means["policy/correction_mean"] == pytest.approx(1.0, **CLOSE)
    assert means["policy/correction_truncated_fraction"] == 0.5
    assert means["policy/correction_masked_fraction"] == 0.0


def test_a_masked_token_keeps_its_place_in_the_denominator() -> None:
    loss, grads, means = _corrected(Correction(level="token", mode="mask", low=0.0, high=1.5))
    # the other token weighs 0.5 as before
    assert loss.item() == pytest.approx(0.5 * (3.0 + 0.05), **CLOSE)
    assert grads["logprobs"][1].item() == 0.0
    assert means["policy/correction_mean"] == 0.5
    assert means["policy/correction_masked_fraction"] == 0.5


def test_a_ratio_to_the_sampler_stands_beside_corrections_of_the_old_policy() -> None:
    """SkyRL's rollout_is with a correction: -w sg(rho) A log pi with rho = pi / mu where it is within bounds,
    and w = old / mu."""
    loss, grads, diagnostics = _policy(
        replace(
            GRPO,
            policy_loss=MaskedIs(clip_low=0.5, clip_high=0.5, ratio_to="behavior"),
            corrections=(Correction(level="token", mode="truncate", low=0.0, high=1.25),),
        ),
        [-1.0, -2.0],
        advantages=[1.0, -3.0],
        old_logprobs=[-1.0 + math.log(2.0), -2.0],
        behavior_logprobs=[-1.0 - math.log(1.2), -2.0 - math.log(1.6)],
    )
    # rho = (1.2, 1.6), of which the second is masked; w = (2.4, 1.6), truncated at 1.25
    assert loss.item() == pytest.approx(0.5 * (1.25 * 1.2 * 1.0 * 1.0), **CLOSE)
    assert grads["logprobs"].tolist() == pytest.approx([0.0, -0.5 * 1.25 * 1.2, 0.0], **CLOSE)
    assert _means(diagnostics)["policy/ratio_mean"] == pytest.approx(1.4, **CLOSE)


def test_corrections_multiply() -> None:
    truncate = Correction(level="token", mode="truncate", low=0.0, high=5.0)
    mask = Correction(level="token", mode="mask", low=1.0, high=5.0)
    loss, _, means = _corrected(truncate, mask)
    assert loss.item() == pytest.approx(0.5 * (-2.0 + 0.05), **CLOSE)
    assert means["policy/correction_mean"] == pytest.approx(1.0, **CLOSE)
    # the product over the sequence is 1
    loss, _, _ = _corrected(replace(truncate, level="sequence"))
    assert loss.item() == pytest.approx(0.5 * (2.0 + 0.05), **CLOSE)


def test_the_decoupled_recipe_weights_by_the_sampler_and_masks_outliers() -> None:
    recipe = RECIPES["decoupled_ppo"]
    logs = {"old_logprobs": [-1.0, -1.0], "behavior_logprobs": [-1.0 - math.log(2.0), -4.0]}
    loss, _, _ = _policy(recipe, [-1.0, -1.0], advantages=[1.0, 1.0], **logs)
    assert loss.item() == pytest.approx(-0.5 * 2.0, **CLOSE)  # w = 2, and e^3 > 5


def test_a_correction_without_the_samplers_log_probs_is_a_bug() -> None:
    recipe = replace(GRPO, corrections=(Correction(level="token", mode="mask", low=0.0, high=2.0),))
    with pytest.raises(AssertionError, match="need behavior_logprobs"):
        _policy(recipe, [-1.0, -2.0], advantages=[0.0, 0.0])


def test_the_supervised_term_is_the_cross_entropy_under_its_own_weights() -> None:
    recipe = replace(GRPO, supervised_coef=0.1)
    loss, grads, diagnostics = _policy(
        recipe, [-1.0, -2.0], advantages=[0.0, 0.0], supervised_weights=[0.0, 0.25]
    )
    assert loss.item() == pytest.approx(0.1 * 0.25 * 2.0)
    assert grads["logprobs"].tolist() == pytest.approx([0.0, 0.0, -0.025])
    assert diagnostics.means["policy/supervised_loss"][1].item() == 1
    assert _means(diagnostics)["policy/supervised_loss"] == 2.0


def test_a_sequences_ratio_is_clipped_as_one() -> None:
    old = [-1.0 - math.log(1.1), -2.0 - math.log(1.6)]
    recipe = replace(GRPO, policy_loss=PpoClip(ratio_level="sequence"))
    loss, grads, diagnostics = _policy(recipe, [-1.0, -2.0], advantages=[1.0, 1.0], old_logprobs=old)
    # sqrt(1.1 * 1.6) = 1.327 is above 1.2 for both tokens
    assert loss.item() == pytest.approx(-0.5 * 2.4, **CLOSE)
    assert grads["logprobs"].tolist() == [0.0, 0.0, 0.0]
    assert _means(diagnostics)["policy/ratio_mean"] == pytest.approx(math.sqrt(1.76), **CLOSE)


def test_the_ratio_is_limited_only_where_the_recipe_says_so() -> None:
    assert policy_loss(GRPO).limits == {}
    assert policy_loss(replace(GRPO, early_stop_ratio=1.5)).limits == {"policy/ratio_mean": 1.5}


def test_masked_values_are_not_read() -> None:
    outputs = _outputs([-1.0, -2.0])
    batch = _batch(advantages=[2.0, -4.0])
    for field in batch.fields.values():
        field[0] = math.nan
    loss, diagnostics = policy_loss(GRPO).compute(outputs, batch)
    assert loss.item() == pytest.approx(1.0)
    assert all(math.isfinite(value) for value in _means(diagnostics).values())


def test_the_critics_loss_is_weighted_and_its_clipping_counted() -> None:
    recipe = replace(GRPO, value_clip=0.5, value_loss_coef=0.1)
    values = torch.tensor([9.0, 2.0, 1.0], requires_grad=True)
    batch = _batch(values=[1.0, 1.0], returns=[3.0, 1.0])
    outputs = {"values": values, "value_deviation": torch.ones(3)}
    loss, diagnostics = value_loss_of(recipe).compute(outputs, batch)
    # kept within 0.5 of 1: 1.5, so half of 1.5^2 instead of half of 1
    assert loss.item() == pytest.approx(0.1 * 0.5 * 1.125)
    assert _means(diagnostics) == pytest.approx(
        {"critic/value_mean": 1.5, "critic/return_mean": 2.0, "critic/clip_fraction": 0.5}
    )


def test_a_critic_with_normalized_values_is_clipped_in_units_of_its_deviation() -> None:
    recipe = replace(GRPO, value_clip=0.5)
    batch = _batch(values=[10.0, 10.0], returns=[30.0, 10.0])
    outputs = {"values": torch.tensor([90.0, 20.0, 11.0]), "value_deviation": torch.full((3,), 10.0)}
    loss, diagnostics = value_loss_of(recipe).compute(outputs, batch)
    # kept within 5 of 10: 15, so half of 15^2 instead of half of 10^2; and half of 1
    assert loss.item() == pytest.approx(0.5 * (112.5 + 0.5))
    assert _means(diagnostics)["critic/clip_fraction"] == 0.5


def test_a_geometric_mask_after_a_token_mask_is_over_the_tokens_that_it_kept() -> None:
    """The first token's ratio is e^1, the second's 1: their geometric mean e^0.5 is outside [0.9, 1.1], that
    of the second alone is not."""
    masks = (
        Correction(level="token", mode="mask", low=0.0, high=2.0),
        Correction(level="geometric", mode="mask", low=0.9, high=1.1),
    )
    fields = {"advantages": [1.0, 1.0], "old_logprobs": [-1.0, -1.0], "behavior_logprobs": [-2.0, -1.0]}
    for tokens, expected in (("all", 0.0), ("kept", -0.5)):
        recipe = replace(GRPO, corrections=(masks[0], replace(masks[1], tokens=tokens)))
        loss, _, diagnostics = _policy(recipe, [-1.0, -1.0], **fields)
        assert loss.item() == pytest.approx(expected)
        assert _means(diagnostics)["policy/correction_masked_fraction"] == (1.0 if tokens == "all" else 0.5)


def test_values_of_turns_are_learned_at_their_first_tokens() -> None:
    """Errors 2 and 3 at the first tokens of the two turns, whatever the value of the token between."""
    recipe = replace(GRPO, advantage=advantage_of("gae", level="turn"), value_clip=None)
    fields = {"values": torch.zeros(5), "returns": torch.tensor([0.0, 2.0, 2.0, 0.0, 3.0])}
    values = torch.zeros(5).index_fill(0, torch.tensor([2]), 7.0).requires_grad_()
    batch = PackedBatch({}, TURNS >= 0, (5,), fields, torch.full((5,), 0.5), TURNS)
    outputs = {"values": values, "value_deviation": torch.ones(5)}
    loss, diagnostics = value_loss_of(recipe).compute(outputs, batch)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.5 * 4 + 0.5 * 9))
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -1.0, 0.0, 0.0, -1.5])
    assert _means(diagnostics)["critic/return_mean"] == 2.5


def test_without_a_value_clip_nothing_is_counted_as_clipped() -> None:
    batch = _batch(values=[1.0, 1.0], returns=[3.0, 1.0])
    outputs = {"values": torch.ones(3), "value_deviation": torch.ones(3)}
    _, diagnostics = value_loss_of(replace(GRPO, value_clip=None)).compute(outputs, batch)
    assert "critic/clip_fraction" not in diagnostics.means


def test_the_supervised_loss_is_the_cross_entropy_of_the_masked_tokens() -> None:
    logprobs = torch.tensor([-7.0, math.log(0.5), math.log(0.25)])
    loss, diagnostics = supervised_loss().compute({"logprobs": logprobs}, _batch())
    assert loss.item() == pytest.approx(1.5 * math.log(2.0), **CLOSE)
    assert _means(diagnostics)["sft/token_probability"] == pytest.approx(0.375, **CLOSE)


def test_a_micro_batch_without_written_positions_adds_nothing() -> None:
    batch = replace(
        _batch(advantages=[2.0, -4.0], behavior_logprobs=[0.0, 0.0]), mask=torch.zeros(3, dtype=torch.bool)
    )
    loss, diagnostics = policy_loss(GRPO).compute(_outputs([-1.0, -2.0]), batch)
    assert loss.item() == 0.0
    assert all(total == 0 and count == 0 for total, count in diagnostics.means.values())
    assert all(value == -math.inf for value in diagnostics.maxima.values())
