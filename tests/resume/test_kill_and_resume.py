"""A run killed at any moment and resumed ends with the same bits as an uninterrupted one.

Real processes, real SIGKILL: at random moments, and at moments when a checkpoint is being written. Equal means: the same
metrics in every round (times and memory aside), the same final evaluation, and the same SHA-256 of every weight.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from braid.report.names import describe

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_KILLS = 20
NUM_ROUNDS = 40

CONFIG = {
    "run": {"name": "tiny", "max_rounds": NUM_ROUNDS, "num_threads": 1, "device": "cpu"},
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


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    command = [
        sys.executable,
        "-m",
        "braid.cli.main",
        "train",
        "tiny.yaml",
        "run.output_dir=runs",
        *overrides,
    ]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


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


def wait_for(moment: str, run: Path, process: subprocess.Popen[str], rng: random.Random) -> None:
    """Until a random moment of the kind named, at most a few rounds on, or the end of the process."""
    before = num_lines(run)
    end = time.monotonic() + rng.uniform(0.0, 8.0)
    while process.poll() is None and time.monotonic() < end and num_lines(run) < before + 2:
        time.sleep(0.005)
    if moment == "write":
        while process.poll() is None:
            if any(not path.name.startswith("step_") for path in (run / "checkpoints").glob("*")):
                time.sleep(rng.uniform(0, 0.01))
                return
    else:
        time.sleep(rng.uniform(0, 0.2))


@pytest.mark.slow
def test_a_run_killed_twenty_times_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    broken.mkdir()
    whole = start(unbroken)
    output, _ = whole.communicate()
    assert whole.returncode == 0, output

    rng = random.Random(7)
    run = broken / "runs" / "tiny"
    kills = {"moment": 0, "write": 0}
    while sum(kills.values()) < NUM_KILLS:
        process = start(broken, "run.resume=latest", f"run.max_rounds={NUM_ROUNDS}")
        kind = "write" if sum(kills.values()) % 2 else "moment"
        wait_for(kind, run, process, rng)
        if process.poll() is not None:
            output, _ = process.communicate()
            assert process.returncode == 0, output
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills[kind] += 1
    last = start(broken, "run.resume=latest")
    output, _ = last.communicate()
    assert last.returncode == 0, output
    assert sum(kills.values()) == NUM_KILLS, f"the run ended after {kills}; make it longer"
    assert numbers(run) == numbers(unbroken / "runs" / "tiny")
    assert weight_hashes(run) == weight_hashes(unbroken / "runs" / "tiny")
