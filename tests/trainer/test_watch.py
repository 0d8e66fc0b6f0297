"""A run that learns nothing logs one warning with advice."""

from __future__ import annotations

import re

import numpy as np
import pytest

from braid.algorithms.advantages import ADVANTAGES
from braid.config.schema import RunConfig
from braid.plan import resolve
from braid.trainer import commands
from braid.trainer.watch import PATIENCE, LearningWatch

from .conftest import LoadTiny

HEALTHY = {
    "reward/mean": 0.5,
    "reward/same_in_group_fraction": 0.4,
    "rollout/truncated_fraction": 0.1,
    "policy/grad_norm": 0.3,
}


def _watch(recipe: str = "grpo", **algorithm: str) -> LearningWatch:
    config = RunConfig.model_validate(
        {
            "run": {"max_rounds": 9},
            "model": {"build": {}},
            "data": {"train": [{"kind": "procedural", "generator": "chain_sum", "size": 64}]},
            "reward": {"parts": [{"kind": "exact"}]},
            "rollout": {"prompts_per_round": 4, "group_size": 8},
            "algorithm": {"recipe": recipe, **algorithm},
        }
    )
    return LearningWatch(config, resolve(config))


def _told(
    caplog: pytest.LogCaptureFixture, watch: LearningWatch, rounds: list[dict[str, float]]
) -> list[str]:
    caplog.clear()
    for number, changes in enumerate(rounds, 1):
        watch.see(number, HEALTHY | changes)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("sign", "advice"),
    [
        ({"reward/same_in_group_fraction": 1.0, "reward/mean": 0.0}, "same reward (mean 0)"),
        ({"policy/grad_norm": 0.0}, "policy/grad_norm is exactly 0"),
        ({"sft/grad_norm": 0.0}, "sft/grad_norm is exactly 0"),
        (
            {"rollout/truncated_fraction": 0.95},
            "95% of the answers are truncated; raise rollout.sampling.max_new_tokens",
        ),
        # what follows from it is not told beside it
        ({"reward/same_in_group_fraction": 1.0, "policy/grad_norm": 0.0}, "same reward"),
    ],
)
def test_each_sign_is_reported_once_per_occurrence(
    caplog: pytest.LogCaptureFixture, sign: dict[str, float], advice: str
) -> None:
    assert _told(caplog, _watch(), [sign] * (PATIENCE - 1) + [{}]) == []
    (warning,) = _told(caplog, _watch(), [sign] * 3 * PATIENCE)
    assert advice in warning
    assert warning.startswith(f"{PATIENCE} consecutive rounds, up to {PATIENCE}: ")
    assert len(_told(caplog, _watch(), [*[sign] * PATIENCE, {}, *[sign] * PATIENCE])) == 2


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
def test_equal_rewards_are_a_sign_where_rewards_of_a_group_are_compared(
    caplog: pytest.LogCaptureFixture, advantage: str
) -> None:
    equal = {"reward/same_in_group_fraction": 1.0}
    warnings = _told(caplog, _watch(advantage=advantage), [equal] * PATIENCE)
    assert bool(warnings) == (advantage not in ("gae", "reinforce", "remax"))


def test_equal_rewards_are_a_sign_where_the_groups_mean_is_subtracted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    equal = {"reward/same_in_group_fraction": 1.0}
    assert len(_told(caplog, _watch(advantage="reinforce", reward_mean="group"), [equal] * PATIENCE)) == 1


LEARNED = {"policy/entropy": 1.2, "policy/kl": 0.01, "rollout/output_length_mean": 24.0, "reward/mean": 0.4}
EQUAL = {"reward/same_in_group_fraction": 1.0, "reward/mean": 0.0, "policy/grad_norm": 0.0}


@pytest.mark.parametrize(
    ("now", "advice"),
    [
        (EQUAL | {"policy/entropy": 0.0, "rollout/output_length_mean": 2.0}, "collapsed to one answer"),
        (EQUAL | {"policy/entropy": 3.1}, "writes nearly at random"),
        (EQUAL | {"policy/entropy": 1.1, "policy/kl": 5.0}, "has moved by 5 nats per token"),
        # rewards that differ, and answers that never end, follow from the same cause
        (
            {"policy/entropy": 0.01, "reward/mean": 0.1, "rollout/truncated_fraction": 1.0},
            "collapsed to one answer",
        ),
    ],
)
def test_a_policy_that_updates_have_damaged_needs_smaller_ones_and_not_easier_data(
    caplog: pytest.LogCaptureFixture, now: dict[str, float], advice: str
) -> None:
    (warning,) = _told(caplog, _watch(), [LEARNED, *[LEARNED | now] * PATIENCE])
    assert advice in warning
    assert "Lower train.optimizer.lr=" in warning
    assert f"entropy 1.2 -> {now['policy/entropy']:g} nats" in warning
    assert "easier" not in warning
    assert "max_new_tokens" not in warning


@pytest.mark.parametrize(
    ("before", "now", "advice"),
    [
        ({}, EQUAL, "easier data"),
        ({}, EQUAL | {"reward/mean": 1.0, "policy/entropy": 0.001}, "All are right: use harder data"),
        ({"policy/entropy": 1e-5, "reward/mean": 0.0}, EQUAL | {"policy/entropy": 1e-5}, "raise rollout.sampling.temperature=1"),
        ({}, {"rollout/truncated_fraction": 1.0, "rollout/output_length_mean": 90.0}, "10% were at first.* length 24 -> 90 tokens"),
    ],
)  # fmt: skip
def test_advice_follows_from_entropy_reward_and_length_before_and_after(
    caplog: pytest.LogCaptureFixture, before: dict[str, float], now: dict[str, float], advice: str
) -> None:
    (warning,) = _told(caplog, _watch(), [LEARNED | before, *[LEARNED | now] * PATIENCE])
    assert re.search(advice, warning)
    assert "Lower train.optimizer.lr" not in warning


def test_entropy_may_fall_while_the_reward_rises(caplog: pytest.LogCaptureFixture) -> None:
    learning = {"policy/entropy": 0.01, "reward/mean": 0.9, "policy/kl": 2.0}
    assert _told(caplog, _watch(), [LEARNED, *[LEARNED | learning] * 9]) == []


def test_a_run_with_a_learning_rate_of_100_is_advised_to_lower_it(
    load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    commands.train(load_tiny("train.optimizer.lr=100", "run.max_rounds=5"))
    warned = " ".join(r.getMessage() for r in caplog.records if "consecutive rounds" in r.getMessage())
    assert "Lower train.optimizer.lr=100" in warned
    assert "easier data" not in warned


def test_a_reward_that_falls_over_many_rounds_is_reported_but_noise_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = np.random.default_rng(0)
    level = [{"reward/mean": float(x)} for x in 0.5 + 0.1 * rng.normal(size=300)]
    assert _told(caplog, _watch(), level) == []
    falling = [{"reward/mean": float(x)} for x in np.linspace(0.8, 0.2, 40) + 0.05 * rng.normal(size=40)]
    (warning,) = _told(caplog, _watch(), falling)
    assert "the mean reward has fallen from 0." in warning
    assert "lower train.optimizer.lr=" in warning
    rising = [{"reward/mean": m["reward/mean"]} for m in reversed(falling)]
    assert _told(caplog, _watch(), rising) == []
