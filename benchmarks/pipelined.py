"""The pipelined loop against the on-policy loop, on the same two processes, with slow environments.

Every answer is scored by an environment that takes log-normal time (mean 0.3 s, 99th percentile 3 s), the
same for equal answers; lengths have the long tail that sampling until an end token gives. The figure is
trained tokens per second of whole rounds, the first two left out. Each run starts its own workers; the two
loops take turns.

    python benchmarks/pipelined.py [--size 3m] [--rounds 12] [--repeats 3] [--max-lag 2]

Exits with 1 below 1.8 times the on-policy loop's tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from sizes import SIZES

from braid.config.load import load_config
from braid.plan import resolve
from braid.trainer import commands
from braid.trainer.cluster import launched

GOAL, SKIPPED = 1.8, 2
PROMPTS, GROUP, MAX_NEW = 16, 8, 128
SIGMA = 1.4288
MU = math.log(0.3) - SIGMA**2 / 2
"""Of the logarithm of the latency in seconds: mean 0.3 and 99th percentile exp(MU + 2.3263 SIGMA) = 3."""


async def environment(text: str) -> float:
    """Score an answer after a while."""
    await asyncio.sleep(random.Random(text).lognormvariate(MU, SIGMA))
    return len(set(text)) / max(len(text), 1)


def tokens_per_s(size: str, rounds: int, pipeline: dict[str, Any] | None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rows = (json.dumps({"prompt": f"{17 * i + 3}+{29 * i + 11}="}) + "\n" for i in range(4 * PROMPTS))
        (work / "prompts.jsonl").write_text("".join(rows))
        config = {
            "run": {"name": "bench", "output_dir": folder, "max_rounds": rounds, "device": "cpu", "num_threads": 1},
            "model": {"build": {**SIZES[size], "characters": " 0123456789+=", "max_positions": 256}},
            "cluster": {"devices_per_node": 2, "placement": {"policy": "0", "rollout": "1"}},
            "data": {"train": [{"kind": "file", "path": "prompts.jsonl", "answer_key": None}], "max_prompt_tokens": 32},
            "reward": {"parts": [{"kind": "function", "path": f"{Path(__file__).resolve()}:environment"}],
                       "concurrency": 4096},
            "rollout": {"prompts_per_round": PROMPTS, "group_size": GROUP, "sampling": {"max_new_tokens": MAX_NEW}},
            "algorithm": {"corrections": [{}]},  # the same work per token in both loops
            "pipeline": pipeline,
            "train": {"optimizer": {"lr": 1e-6}},
            "eval": {"before": False, "at_end": False},
            "checkpoint": {"at_end": False},
            "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
        }  # fmt: skip
        path = work / "bench.yaml"
        path.write_text(json.dumps(config))
        loaded = load_config(path)
        plan = resolve(loaded.config)
        with launched(loaded, plan) as cluster:
            run_dir = commands.train(loaded, cluster, plan).run_dir
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["round"] > SKIPPED]
    trained = sum(line["rollout/tokens"] - line.get("pipeline/dropped_tokens", 0) for line in lines)
    return trained / sum(line["time/round_s"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=list(SIZES), default="3m")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-lag", type=int, default=2)
    args = parser.parse_args()
    loops = {"on-policy": None, f"max_lag {args.max_lag}": {"max_lag": args.max_lag}}
    runs = [
        [tokens_per_s(args.size, args.rounds, overlap) for overlap in loops.values()]
        for _ in range(args.repeats)
    ]
    ratio = statistics.median(pipelined / on_policy for on_policy, pipelined in runs)
    for name, figures in zip(loops, zip(*runs, strict=True), strict=True):
        print(f"{name}: {statistics.median(figures):,.0f} trained tokens/s")
    print(f"ratio {ratio:.2f}, to be at least {GOAL}")
    sys.exit(ratio < GOAL)


if __name__ == "__main__":
    main()
