"""A pipelined run killed at any moment trains on every prompt once: groups in flight are sampled again."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.forks import CONTEXT
from tests.resume.test_kill_and_resume import num_lines

from braid.config.load import load_config
from braid.data.sampler import PromptSampler
from braid.plan import resolve
from braid.report.samples import read_samples
from braid.trainer import commands
from braid.trainer.cluster import launched

NUM_PROMPTS, SIZE = 7, 2
REWARDS = """
import asyncio, random

async def slow(answer):
    await asyncio.sleep(random.expovariate(1 / 0.1))  # so that groups overtake each other
    return float(answer == "a")
"""
CONFIG: dict[str, Any] = {
    "run": {"name": "tiny", "num_threads": 1, "device": "cpu", "output_dir": "runs", "resume": "latest"},
    "model": {
        "build": {
            "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
            "head_dim": 16, "characters": "abcdefgh",
        }
    },
    "data": {"train": [{"kind": "file", "path": "letters.jsonl"}]},
    "reward": {"parts": [{"kind": "function", "path": "rewards.py:slow"}]},
    "rollout": {"prompts_per_round": SIZE, "group_size": 2, "sampling": {"max_new_tokens": 4}},
    "pipeline": {"max_lag": 2, "groups_in_flight": 5, "over_lag": "resample"},
    "train": {"optimizer": {"lr": 1e-3}},
    "checkpoint": {"every_rounds": 1, "keep": 2},
    "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 1},
}  # fmt: skip
ON_WORKERS = {"placement": {"policy": "0", "rollout": "1-2"}, "devices_per_node": 3}


def train(folder: Path, num_rounds: int, cluster: dict[str, Any]) -> None:
    rows = [f'{{"prompt": "{letter}", "answer": "{letter}"}}\n' for letter in "abcdefgh"[:NUM_PROMPTS]]
    (folder / "letters.jsonl").write_text("".join(rows))
    (folder / "rewards.py").write_text(REWARDS)
    run = CONFIG["run"] | {"max_rounds": num_rounds, "output_dir": str(folder / "runs")}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG | {"run": run, "cluster": cluster}))
    loaded = load_config(folder / "tiny.yaml")
    plan = resolve(loaded.config)
    with launched(loaded, plan) as processes:
        commands.train(loaded, processes, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_kills", "cluster"),
    [
        pytest.param(4, {}, id="one process"),
        pytest.param(30, {}, id="one process, for long", marks=pytest.mark.nightly),
        pytest.param(
            1, ON_WORKERS, id="workers", marks=[pytest.mark.nightly, pytest.mark.xdist_group("workers")]
        ),
    ],
)
def test_a_killed_run_trains_on_every_prompt_once(
    tmp_path: Path, num_kills: int, cluster: dict[str, Any]
) -> None:
    rng, run, num_rounds = random.Random(11), tmp_path / "runs" / "tiny", 4 * num_kills + 4
    kills = 0
    while kills < num_kills:
        process = CONTEXT.Process(target=train, args=[tmp_path, num_rounds, cluster])
        process.start()
        enough = num_lines(run) + rng.randrange(1, 3)
        while process.is_alive() and num_lines(run) < enough:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
    assert kills > num_kills / 2, "the run has ended too early"
    last = CONTEXT.Process(target=train, args=[tmp_path, num_rounds, cluster])
    last.start()
    last.join()
    assert last.exitcode == 0

    trained = Counter[int]()
    files = sorted((run / "samples").glob("round_*"))
    assert len(files) == num_rounds
    for file in files:
        uids = [
            sample.trajectory.prompt.uid for sample in read_samples(file) if sample.trajectory.sample == 0
        ]
        assert len(uids) == SIZE
        trained.update(int(uid.rpartition(":")[2]) for uid in uids)
    assert trained == Counter(PromptSampler(NUM_PROMPTS, seed=0, shuffle=True).take(num_rounds * SIZE))
