"""The pipelined loop, run for real: at lag 0 it is the on-policy loop, above it sampling and training overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.controller.conftest import LoadTiny
from tests.resume.test_kill_and_resume import numbers, weight_hashes

from braid.controller import commands
from braid.errors import ConfigError, TrainingError

ROUNDS = ("run.max_rounds=4", "checkpoint.every_rounds=2", "eval.every_rounds=2")


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.recipe=ppo", "train.steps_per_pass=2", "train.passes_per_round=2"),
        ("rollout.filter.min_std=0.0", "rollout.filter.then=resample", "rollout.filter.max_batches=3"),
        ("rollout.filter.min_std=0.0", "rollout.filter.then=replace"),
        ("rollout.native.dtype=bf16", "algorithm.recipe=decoupled_ppo"),
    ],
    ids=["grpo", "ppo", "resample", "replace", "bf16"],
)
def test_at_lag_0_the_weights_are_those_of_the_on_policy_loop(
    load_tiny: LoadTiny, overrides: tuple[str, ...]
) -> None:
    one = commands.train(load_tiny(*ROUNDS, *overrides)).run_dir
    other = commands.train(load_tiny("run.name=other", "pipeline.max_lag=0", *ROUNDS, *overrides)).run_dir
    assert weight_hashes(one) == weight_hashes(other)
    shown = [{k: v for k, v in line.items() if not k.startswith("pipeline/")} for line in numbers(other)]
    assert shown == numbers(one)


REWARD = """
import asyncio
import random


async def score(samples):
    await asyncio.sleep(random.expovariate(1 / 0.02))  # other groups go on
    return [float(s.answer == s.fields["answer"]) for s in samples]
"""


@pytest.mark.parametrize("on_new_weights", ["finish", "interrupt"])
def test_sampling_and_training_overlap_within_the_lag(load_tiny: LoadTiny, on_new_weights: str) -> None:
    pipeline = ("pipeline.max_lag=2", f"pipeline.on_new_weights={on_new_weights}", "run.max_rounds=8")
    outcome = commands.train(load_tiny(*pipeline, "eval.every_rounds=4"))
    lines = records(outcome.run_dir)[1:]
    assert [line["round"] for line in lines] == list(range(1, 9))
    assert max(line["pipeline/lag_max"] for line in lines) in (1, 2)
    for line in lines:
        shares = {int(k.rpartition("/")[2]): v for k, v in line.items() if k.startswith("pipeline/lag_share/")}
        assert sum(shares.values()) == pytest.approx(1)
        assert line["pipeline/lag_mean"] == pytest.approx(sum(lag * share for lag, share in shares.items()))
        assert line["rollout/trajectories"] == 32
        assert line["policy/correction_mean"] > 0, "a correction by default"
