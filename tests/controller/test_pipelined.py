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
