"""A run killed at any moment and resumed ends with the same bits as an uninterrupted one.

Real processes, real SIGKILL: at random moments, and at moments when a checkpoint is being written. The
processes are forked from one that has imported torch, so that each starts at once. Equal means: the same
metrics in every round (times and memory aside), the same final evaluation, and the same SHA-256 of every
weight.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from examples.tabletop import Tabletop, expert
from safetensors import safe_open
from tests.forks import CONTEXT
from tests.models.vla_checkpoints import tiny_openvla

from braid.config.load import load_config
from braid.data.lerobot import Demonstration, write_demonstrations
from braid.plan import default_verb
from braid.report.names import describe
from braid.trainer import commands

EXAMPLES = Path(__file__).parents[2] / "examples"

CONFIG = {
    "run": {"name": "tiny", "max_rounds": 10, "num_threads": 1, "device": "cpu"},
    "model": {
        "build": {
            "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
            "head_dim": 16, "characters": " 0123456789+-=A:",
        }
    },
    "data": {
        "train": [
            {
                "kind": "procedural", "name": "sums", "generator": "chain_sum", "size": 30, "template": "{metadata[expression]} =",
                "params": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            }
        ],
        "eval": [
            {
                "kind": "procedural", "name": "held_out", "generator": "chain_sum", "size": 8, "seed": 1000,
                "template": "{metadata[expression]} =",
                "params": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            }
        ],
        "max_prompt_tokens": 32,
    },
    "sft": {
        "data": [
            {
                "kind": "procedural", "generator": "chain_sum", "size": 64, "seed": 5000,
                "template": "{metadata[expression]} =", "response_function": f"{EXAMPLES}/solutions.py:chain_sum",
                "params": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            }
        ],
        "steps": 3, "rows_per_step": 16,
    },
    "reward": {"parts": [{"kind": "pattern", "pattern": "1"}, {"kind": "reasoning_gym", "pattern": "A:(-?[0-9]+)$"}]},
    "rollout": {"prompts_per_round": 4, "group_size": 4, "sampling": {"max_new_tokens": 12}},
    "algorithm": {"recipe": "ppo", "kl_coef": 0.01, "kl_in": "loss"},
    "train": {"steps_per_pass": 2, "passes_per_round": 2, "optimizer": {"lr": 1e-3}},
    "eval": {"every_rounds": 4},
    "checkpoint": {"every_rounds": 1, "keep": 2},
    "report": {"console": "none", "samples_every_rounds": 3},
}  # fmt: skip


def start(folder: Path, *overrides: str, config: Mapping[str, Any] = CONFIG) -> ForkServerProcess:
    process = CONTEXT.Process(target=_train, args=[folder, overrides, config])
    process.start()
    return process


def _train(folder: Path, overrides: tuple[str, ...], config: Mapping[str, Any]) -> None:
    os.chdir(folder)
    Path("tiny.yaml").write_text(yaml.safe_dump(dict(config)))
    loaded = load_config("tiny.yaml", ["run.output_dir=runs", *overrides])
    (commands.sft if default_verb(loaded.config) == "sft" else commands.train)(loaded)


def numbers(run: Path) -> list[dict[str, float]]:
    """The metrics of each round, without those that depend on the clock or the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if describe(name).is_reproducible} for line in lines]


def weight_hashes(run: Path) -> dict[str, str]:
    """SHA-256 of each tensor in the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step_*"), key=lambda p: int(p.name.split("_")[1]))
    hashes = {}
    for file in sorted(newest.rglob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # safe_open is no mapping
                hashes[f"{file.name}/{name}"] = hashlib.sha256(
                    tensors.get_tensor(name).numpy().tobytes()
                ).hexdigest()
    return hashes


def num_lines(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def seconds_per_round(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["time/round_s"] for line in lines if "time/round_s" in line)


def wait_for(moment: str, run: Path, process: ForkServerProcess, rng: random.Random, longest: float) -> None:
    """Until a random moment of the kind named, at most two rounds on, or the end of the process. `longest`
    is that of a round, in seconds."""
    enough = num_lines(run) + rng.randrange(2)
    while process.is_alive() and num_lines(run) < enough:
        time.sleep(0.005)
    if moment == "write":
        while process.is_alive():
            if any(not path.name.startswith("step_") for path in (run / "checkpoints").glob("*")):
                time.sleep(rng.uniform(0, 0.01))
                return
    else:
        time.sleep(rng.uniform(0, longest))


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [6, pytest.param(20, marks=pytest.mark.nightly)])
def test_a_run_killed_many_times_equals_the_uninterrupted_run(tmp_path: Path, num_kills: int) -> None:
    run = CONFIG["run"] | {"max_rounds": 2 * num_kills + 4}
    _check_killed(tmp_path, CONFIG | {"run": run}, num_kills)


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        pytest.param(
            {
                "kind": "gymnasium",
                "id": f"{EXAMPLES}/tabletop.py:Tabletop",
                "kwargs": {"max_episode_steps": 10},
            },
            id="tabletop",
        ),
        pytest.param(
            {"kind": "metaworld", "task": "button-press-v3", "max_episode_steps": 10},
            id="metaworld",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_killed_run_of_a_simulator_equals_the_uninterrupted_one(
    tmp_path: Path, env: dict[str, Any]
) -> None:
    """Chunks of two actions, one environment with images, in a child process."""
    mlp = {"hidden_sizes": [16], "num_action_chunks": 2} | ({"channels": [4]} if "id" in env else {})
    config: dict[str, Any] = {
        name: CONFIG[name] for name in ("rollout", "train", "eval", "checkpoint", "report")
    }
    config |= {
        "run": CONFIG["run"],
        "model": {"mlp": mlp},
        "env": env | {"num_envs": 4, "eval_episodes": 4},
        "rollout": {"prompts_per_round": 4, "group_size": 1},
        "algorithm": {"recipe": "ppo", "kl_coef": 0.0},
    }
    _check_killed(tmp_path, config, 4)


@pytest.mark.slow
def test_a_killed_run_of_soft_actor_critic_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """Random actions in the first two rounds, updates from the second, a buffer that overwrites its oldest
    episodes from the sixth."""
    config: dict[str, Any] = {name: CONFIG[name] for name in ("run", "checkpoint", "report")}
    config |= {
        "model": {"mlp": {"hidden_sizes": [16]}},
        "env": {
            "kind": "gymnasium", "id": "Pendulum-v1", "rescale_actions": True, "max_episode_steps": 10,
            "num_envs": 2, "processes": 0, "eval_episodes": 2,
        },
        "rollout": {"prompts_per_round": 2, "group_size": 1},
        "sac": {
            "batch_size": 16, "random_decisions": 30, "min_transitions": 25, "capacity": 100, "num_critics": 3,
            "num_target_critics": 2, "critic_norm": "layer", "actor_every_updates": 3,
        },
        "eval": {"every_rounds": 4},
    }  # fmt: skip
    _check_killed(tmp_path, config, 4)


@pytest.mark.slow
def test_a_killed_run_of_a_vision_language_action_policy_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """Imitation of demonstrations, then GRPO, on the tabletop."""
    tiny_openvla(tmp_path / "model")
    _demonstrate(tmp_path / "demonstrations")
    config: dict[str, Any] = {name: CONFIG[name] for name in ("eval", "checkpoint", "report", "train")}
    config |= {
        "run": CONFIG["run"],
        "model": {
            "path": str(tmp_path / "model"),
            "vla": {"kind": "openvla_oft", "form": "rlinf", "action_dim": 3, "num_action_chunks": 4},
        },
        "env": {
            "kind": "gymnasium", "id": f"{EXAMPLES}/tabletop.py:Tabletop", "kwargs": {"max_episode_steps": 8},
            "num_envs": 4, "eval_episodes": 4,
        },
        "sft": {"demonstrations": str(tmp_path / "demonstrations"), "steps": 3, "rows_per_step": 8},
        "rollout": {"prompts_per_round": 2, "group_size": 4},
        "algorithm": {"recipe": "grpo", "kl_coef": 0.0},
    }  # fmt: skip
    _check_killed(tmp_path, config, 4)


@pytest.mark.slow
def test_supervised_fine_tuning_killed_within_a_pass_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """Passes of 10, 10, 10 and 5 examples, from two sources in shares."""
    (source,) = CONFIG["sft"]["data"]
    sources = [source | {"name": "many", "size": 30}, source | {"name": "few", "size": 5}]
    names = ("model", "checkpoint", "report")
    config: dict[str, Any] = {name: CONFIG[name] for name in names} | {
        "run": {"name": "tiny", "num_threads": 1, "device": "cpu"},
        "sft": {
            "data": sources,
            "eval_data": [source | {"seed": 9000, "size": 8}],
            "mix": [{"sources": ["many"], "share": 3}, {"sources": ["few"], "share": 1}],
            "epochs": 3,
            "rows_per_step": 10,
        },
        "eval": {"every_rounds": 4},
    }
    _check_killed(tmp_path, config, 5)


def _demonstrate(folder: Path) -> None:
    """Two frames of the tabletop's expert."""
    env = Tabletop()
    before, action = env.reset(seed=0)[0], expert(env)
    after = env.step(action)[0]
    observations = {name: np.stack([before[name], after[name]]) for name in ("image", "state")}
    actions = np.stack([action, expert(env)])
    write_demonstrations(folder, [Demonstration(observations, actions, env.instruction)])


def _check_killed(tmp_path: Path, config: Mapping[str, Any], num_kills: int) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    broken.mkdir()
    whole = start(unbroken, config=config)
    whole.join()
    assert whole.exitcode == 0

    rng = random.Random(7)
    longest = seconds_per_round(unbroken / "runs" / "tiny")
    run = broken / "runs" / "tiny"
    kills = {"moment": 0, "write": 0}
    while sum(kills.values()) < num_kills:
        process = start(broken, "run.resume=latest", config=config)
        kind = "write" if sum(kills.values()) % 2 else "moment"
        wait_for(kind, run, process, rng, longest)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills[kind] += 1
    last = start(broken, "run.resume=latest", config=config)
    last.join()
    assert last.exitcode == 0
    assert sum(kills.values()) == num_kills, f"the run ended after {kills}; make it longer"
    assert numbers(run) == numbers(unbroken / "runs" / "tiny")
    assert weight_hashes(run) == weight_hashes(unbroken / "runs" / "tiny")
