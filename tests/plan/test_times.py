"""The time of a round from rates, by hand."""

from __future__ import annotations

import pytest

from braid.config.load import load_config
from braid.plan import Plan, resolve
from braid.plan.memory import LOGPROBS, ROLLOUT, SYNC
from braid.plan.times import Lengths, Rates, plan_times, round_s, typical_lengths

BASE = [
    "model.build={}",
    "run={max_rounds: 10, device: cpu}",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "reward.parts=[{kind: exact}]",
    "rollout={prompts_per_round: 4, group_size: 2}",
]
RATES = Rates(
    train_token_s=0.01,
    step_s=1.0,
    infer_token_s=0.001,
    running=4,
    prefill_s=0.5,
    decode_step_s=0.1,
    copy_bytes_per_s=1e9,
    disk_bytes_per_s=1e8,
)
LENGTHS = Lengths(prompt=10, answer=20)
TOKENS = 8 * 20 + 4 * 10
"""Eight answers, and the prompts of four groups."""


def times(*overrides: str, rates: Rates = RATES) -> tuple[Plan, dict[str, float | None]]:
    config = load_config(None, [*BASE, *overrides]).config
    plan = resolve(config, num_gpus=0)
    stages = plan_times(config, plan, rates, LENGTHS)
    total = round_s(plan, stages)
    return plan, {time.stage: time.seconds for time in stages} | {"all": total}


def test_a_round_of_one_step() -> None:
    _, stages = times()
    assert stages == pytest.approx(
        {ROLLOUT: 2 * (0.5 + 20 * 0.1), "policy update": TOKENS * 0.01 + 1.0, SYNC: 0.0, "all": 8.0}
    )


def test_every_pass_over_the_rows_counts() -> None:
    _, stages = times("algorithm.recipe=ppo", "algorithm.kl_coef=0.1", "train.steps_per_pass=2")
    assert stages[LOGPROBS] == pytest.approx(3 * TOKENS * 0.001)
    assert stages["policy update"] == stages["critic update"] == pytest.approx(TOKENS * 0.01 + 2.0)


def test_a_pipeline_takes_the_longer_of_rollout_and_training() -> None:
    plan, stages = times("pipeline={max_lag: 1}")
    assert plan.is_pipelined
    training = sum(value or 0.0 for name, value in stages.items() if name not in (ROLLOUT, "all"))
    assert stages["all"] == pytest.approx(max(stages[ROLLOUT] or 0.0, training))


def test_an_engine_that_is_not_measured_leaves_the_round_unknown() -> None:
    served = Rates(0.01, 1.0, 0.001, 4, None, None, 1e9, 1e8)
    _, stages = times(rates=served)
    assert stages[ROLLOUT] is None
    assert stages["all"] is None


def test_lengths_are_the_longest_possible_ones_by_default() -> None:
    config = load_config(
        None, [*BASE, "data.max_prompt_tokens=30", "rollout.sampling.max_new_tokens=50"]
    ).config
    plan = resolve(config, num_gpus=0)
    assert typical_lengths(plan, None, None) == Lengths(30, 50)
    assert typical_lengths(plan, 5, 7) == Lengths(5, 7)
