"""The pipelined loop, run for real: at lag 0 it is the on-policy loop, above it sampling and training
overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.resume.test_kill_and_resume import numbers, weight_hashes
from tests.trainer.conftest import LoadTiny

from braid.config.load import load_config
from braid.errors import ConfigError, TrainingError
from braid.plan import resolve
from braid.trainer import commands

ROUNDS = ("run.max_rounds=4", "checkpoint.every_rounds=2", "eval.every_rounds=2")


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.recipe=ppo", "train.steps_per_pass=2", "train.passes_per_round=2"),
        ("rollout.filter.min_std=0.0", "rollout.filter.then=resample", "rollout.filter.max_batches=3"),
        ("rollout.filter.min_std=0.0", "rollout.filter.then=replace"),
        ("rollout.engine.dtype=bf16", "algorithm.recipe=decoupled_ppo"),
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


def test_a_checkpoint_of_the_on_policy_loop_goes_on_with_a_pipeline(load_tiny: LoadTiny) -> None:
    whole = commands.train(load_tiny("run.max_rounds=3", "eval.before=false")).run_dir
    cut = ("run.name=cut", "eval.before=false")
    commands.train(load_tiny(*cut, "run.max_rounds=2"))
    resumed = ("run.max_rounds=3", "pipeline.max_lag=0", "run.resume=latest", "run.allow_changes=true")
    other = commands.train(load_tiny(*cut, *resumed)).run_dir
    assert [line["round"] for line in records(other)] == [0, 1, 2, 3]
    assert weight_hashes(other) == weight_hashes(whole)


@pytest.mark.parametrize("on_new_weights", ["finish", "interrupt"])
def test_sampling_and_training_overlap_within_the_lag(load_tiny: LoadTiny, on_new_weights: str) -> None:
    pipeline = ("pipeline.max_lag=2", f"pipeline.on_new_weights={on_new_weights}", "run.max_rounds=8")
    outcome = commands.train(load_tiny(*pipeline, "eval.every_rounds=4"))
    lines = records(outcome.run_dir)[1:]
    assert [line["round"] for line in lines] == list(range(1, 9))
    assert max(line["pipeline/lag_max"] for line in lines) in (1, 2)
    for line in lines:
        shares = {
            int(k.rpartition("/")[2]): v for k, v in line.items() if k.startswith("pipeline/lag_share/")
        }
        assert sum(shares.values()) == pytest.approx(1)
        assert line["pipeline/lag_mean"] == pytest.approx(sum(lag * share for lag, share in shares.items()))
        assert line["rollout/trajectories"] == 32
        assert line["policy/correction_mean"] > 0, "a correction by default"


@pytest.mark.slow
def test_a_simulator_is_pipelined_too(tmp_path: Path) -> None:
    """At lag 0 to the bit, whichever processes its environments are in, and above it within the lag."""
    folder, runs = Path(__file__).parents[2] / "examples", []
    for name, processes, lag in (
        ("turns", 0, "pipeline=null"),
        ("lag0", 2, "pipeline.max_lag=0"),
        ("lag1", 1, "pipeline.max_lag=1"),
    ):
        short = (
            "run.max_rounds=2",
            "rollout.prompts_per_round=8",
            "eval.every_rounds=0",
        )
        quiet = (
            "report.console=none",
            "report.tensorboard=false",
            "checkpoint.at_end=true",
            "eval.before=false",
        )
        where = (
            f"run.name={name}",
            f"run.output_dir={tmp_path}",
            "eval.at_end=false",
            "eval.target.min_final=null",
            f"env.processes={processes}",
            lag,
        )
        runs.append(commands.train(load_config(folder / "cartpole.yaml", [*short, *quiet, *where])).run_dir)
    assert weight_hashes(runs[0]) == weight_hashes(runs[1])
    assert records(runs[2])[-1]["pipeline/lag_max"] == 1


def test_an_error_of_the_update_ends_the_run(load_tiny: LoadTiny) -> None:
    drops_all = ("rollout.filter.max_mean=0.0", "pipeline.max_lag=1", "run.max_rounds=20")
    with pytest.raises(TrainingError, match="10 consecutive rounds, up to round 10, had nothing to train on"):
        commands.train(load_tiny(*drops_all))


def test_groups_without_a_valid_answer_are_replaced_within_the_lag(load_tiny: LoadTiny) -> None:
    rewards = "def score(prompt):\n    if prompt == 'a':\n        raise ValueError('no')\n    return 1.0\n"
    part = "reward.parts=[{kind: function, path: 'rewards.py:score'}]"
    settings = ("pipeline.max_lag=1", "rollout.max_invalid_fraction=1.0", "run.max_rounds=3", part)
    settings += ("rollout.print_outputs=true",)
    lines = records(commands.train(load_tiny(*settings, rewards=rewards)).run_dir)[1:]
    assert sum(line["pipeline/left_out_groups"] for line in lines) > 0
    for line in lines:
        assert line["rollout/trajectories"] == 32 + 8 * line["pipeline/left_out_groups"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("train.offload.optimizer=true",), "train.offload: moves models to host memory during sampling"),
        (
            (
                "run.device=cuda",
                "cluster.devices_per_node=2",
                "cluster.placement={policy: 0-1, rollout: '1'}",
                "train.backend=fsdp2",
            ),
            "cannot share GPUs with it",
        ),
    ],
    ids=["offload", "placement"],
)
def test_what_a_pipeline_cannot_do_is_refused(
    load_tiny: LoadTiny, overrides: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve(load_tiny("pipeline.max_lag=1", *overrides).config, num_gpus=2)
