"""What `braid plan --measure` says of a round's time, against rounds of `braid train`.

Each case is run for a few rounds at lengths that are forced (`min_new_tokens` equals `max_new_tokens`), and
planned at these lengths. Printed is predicted / measured of rollout, of log-probs with the advantages, of the
update, and of their sum: the median over the rounds after the first. Rates are measured before the run and
after it, and their mean is taken, since other work on a machine changes both. By default there is one thread: several wait for each other, which
on a busy machine takes longer in a run than in short measurements.
Memory is held to what PyTorch allocates by tests/plan/test_memory.py.

    python benchmarks/plan.py [--cases NAME ...] [--rounds 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sizes import SIZES

BASE = {
    "run": {"max_rounds": 5, "device": "cpu", "num_threads": 1},
    "data": {
        "train": [
            {
                "kind": "procedural", "generator": "chain_sum", "size": 1000,
                "params": {"min_terms": 5, "max_terms": 5, "min_digits": 1, "max_digits": 1},
                "template": "{metadata[expression]} =",
            }
        ],
        "max_prompt_tokens": 32,
    },
    "reward": {"parts": [{"kind": "exact"}]},
    "rollout": {"prompts_per_round": 16, "group_size": 8},
    "checkpoint": {"every_rounds": 0, "every_s": 0, "at_end": False},
    "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
}  # fmt: skip
TINY = {"hidden_size": 192, "intermediate_size": 512, "num_layers": 2, "num_heads": 6, "num_kv_heads": 6}
LENGTHS = (19, 64)
"""Tokens of a prompt and of an answer."""
CASES: dict[str, tuple[dict[str, int], list[str]]] = {
    "tiny": (TINY, []),
    "tiny, short": (TINY, ["rollout.sampling={max_new_tokens: 16, min_new_tokens: 16}"]),
    "tiny, large groups": (TINY, ["rollout.group_size=32"]),
    "tiny, KL": (TINY, ["algorithm.kl_coef=0.01"]),
    "tiny, PPO": (TINY, ["algorithm.recipe=ppo"]),
    "tiny, two steps": (TINY, ["train.steps_per_pass=2"]),
    "3m": (SIZES["3m"], []),
    "3m, recomputed": (SIZES["3m"], ["train.gradient_checkpointing=true"]),
    "3m, adapters": (SIZES["3m"], ["model.lora={rank: 8}"]),
    "3m, bf16": (SIZES["3m"], ["model.dtype=bf16"]),
    "3m, six layers": (SIZES["3m"] | {"num_layers": 6}, []),
    "30m": (SIZES["30m"], ["rollout.prompts_per_round=4"]),
}


def braid(*arguments: str) -> str:
    """The output of a command."""
    command = [sys.executable, "-m", "braid", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"braid {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def planned(config: Path, overrides: list[str], prompt: int, answer: int) -> dict[str, float]:
    lengths = ["--prompt-tokens", str(prompt), "--answer-tokens", str(answer)]
    data = json.loads(braid("plan", str(config), "--json", "--measure", *lengths, *overrides))
    return {time["stage"]: time["seconds"] for time in data["times"]}


def compare(folder: Path, name: str, rounds: int, threads: int) -> dict[str, float]:
    """Predicted / measured seconds by stage."""
    build, overrides = CASES[name]
    prompt, answer = LENGTHS
    config = folder / "config.yaml"
    forced: dict[str, Any] = {"max_new_tokens": answer, "min_new_tokens": answer}
    rollout = {**BASE["rollout"], "sampling": forced}
    text = BASE | {"model": {"build": build}, "rollout": rollout}
    config.write_text(json.dumps(text))
    if any("max_new_tokens: 16" in override for override in overrides):
        answer = 16
    overrides = [*overrides, f"run.output_dir={folder}", f"run.max_rounds={rounds}", "run.name=run"]
    overrides.append(f"run.num_threads={threads}")
    before = planned(config, overrides, prompt, answer)
    braid("train", str(config), *overrides)
    after = planned(config, overrides, prompt, answer)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rounds_of = [line for line in lines if "time/update_s" in line][1:]

    def measured(metric: str) -> float:
        return statistics.median(line.get(metric, 0.0) for line in rounds_of)

    def said(*stages: str) -> float:
        return sum(plan.get(stage, 0.0) for plan in (before, after) for stage in stages) / 2

    updates = ("policy update", "critic update")
    taken = [measured(f"time/{verb}_s") for verb in ("rollout", "compute_advantages", "update")]
    predicted = [said("rollout"), said("log-probs"), said(*updates)]
    ratios = {"rollout": predicted[0] / taken[0], "update": predicted[2] / taken[2]}
    if predicted[1]:
        ratios["log-probs"] = predicted[1] / taken[1]
    return ratios | {"round": sum(predicted) / sum(taken)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    print(f"{'case':<20} rollout  log-probs  update  round   (predicted / measured)")
    for name in args.cases:
        with TemporaryDirectory() as folder:
            ratios = compare(Path(folder), name, args.rounds, args.threads)
        cells = [
            f"{ratios[key]:.2f}" if key in ratios else ""
            for key in ("rollout", "log-probs", "update", "round")
        ]
        print(f"{name:<20} {cells[0]:>7}  {cells[1]:>9}  {cells[2]:>6}  {cells[3]:>5}", flush=True)


if __name__ == "__main__":
    main()
