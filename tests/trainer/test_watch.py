"""A run that learns nothing logs one warning with advice."""

from __future__ import annotations

import numpy as np
import pytest

from braid.config.schema import RunConfig
from braid.plan import resolve
from braid.trainer.watch import PATIENCE, LearningWatch

HEALTHY = {
    "reward/mean": 0.5,
    "reward/same_in_group_fraction": 0.4,
    "rollout/truncated_fraction": 0.1,
    "policy/grad_norm": 0.3,
}


def _watch(recipe: str = "grpo") -> LearningWatch:
    config = RunConfig.model_validate(
        {
            "run": {"max_rounds": 9},
            "model": {"build": {}},
            "data": {"train": [{"kind": "procedural", "generator": "chain_sum", "size": 64}]},
            "reward": {"parts": [{"kind": "exact"}]},
            "rollout": {"prompts_per_round": 4, "group_size": 4},
            "algorithm": {"recipe": recipe},
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
    (told,) = _told(caplog, _watch(), [sign] * 3 * PATIENCE)
    assert advice in told
    assert told.startswith(f"{PATIENCE} consecutive rounds, up to {PATIENCE}: ")
    assert len(_told(caplog, _watch(), [*[sign] * PATIENCE, {}, *[sign] * PATIENCE])) == 2


def test_equal_rewards_are_not_a_sign_without_a_group_baseline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    equal = {"reward/same_in_group_fraction": 1.0}
    assert _told(caplog, _watch("ppo"), [equal] * PATIENCE) == []


def test_a_reward_that_falls_over_many_rounds_is_reported_but_noise_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = np.random.default_rng(0)
    level = [{"reward/mean": float(x)} for x in 0.5 + 0.1 * rng.normal(size=300)]
    assert _told(caplog, _watch(), level) == []
    falling = [{"reward/mean": float(x)} for x in np.linspace(0.8, 0.2, 40) + 0.05 * rng.normal(size=40)]
    (told,) = _told(caplog, _watch(), falling)
    assert "the mean reward has fallen from 0." in told
    assert "lower train.optimizer.lr=" in told
    rising = [{"reward/mean": m["reward/mean"]} for m in reversed(falling)]
    assert _told(caplog, _watch(), rising) == []
