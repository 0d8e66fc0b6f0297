"""The driver's own time in a round of 1,024 trajectories on workers, at four lengths of answers.

    python benchmarks/driver_share.py [--trajectories 1024] [--lengths 16 32 64 128] [--rounds 3] [--hidden
    192]

Real runs under Ray: a policy and a rollout worker, each with a process, and the rows of a round in a third.
Measured is CPU time from the end of one round to the end of the next, of the loop's thread and of its whole
process; in the latter Ray's own threads take half a percent of any time that passes. The first round, which
warms up, is left out. Goal: the process under 2 % of the round, and the loop the same for every length, since
tokens never pass through it. The round's time is that of the machine at hand, with a model as small as the
quickstart's: any larger one makes the share smaller.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from braid.config.load import load_config
from braid.trainer import commands
from braid.trainer.progress import Progress

_REWARD = "def even(text):\n    return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)\n"


def main() -> None:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=1024)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=192, help="hidden size of the model, of two layers")
    args = parser.parse_args()
    print(f"{'tokens each':>12} {'round s':>9} {'loop s':>8} {'process s':>10} {'its share':>10}")
    for length in args.lengths:
        with tempfile.TemporaryDirectory() as folder:
            rounds = measure(_config(Path(folder), args, length))
        whole, loop, process = (median(times) for times in zip(*rounds, strict=True))
        print(f"{length:>12} {whole:>9.2f} {loop:>8.3f} {process:>10.3f} {process / whole:>10.2%}")


def measure(config: Path) -> list[tuple[float, float, float]]:
    """(seconds of the round, CPU seconds of this thread in it, of this process), for each round after the
    first."""
    ends: list[tuple[float, float, float]] = []
    report = Progress.report

    def timed(self: Progress) -> None:
        report(self)
        ends.append((time.perf_counter(), time.thread_time(), time.process_time()))

    Progress.report = timed
    try:
        commands.train(load_config(config))
    finally:
        Progress.report = report
    ends = ends[1:]  # the first line is that of the time before the rounds
    return [(b[0] - a[0], b[1] - a[1], b[2] - a[2]) for a, b in itertools.pairwise(ends)]


def _config(folder: Path, args: argparse.Namespace, length: int) -> Path:
    (folder / "even.py").write_text(_REWARD)
    task = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 8 // 3,
        "num_heads": args.hidden // 16,
    }
    build = {**sizes, "num_layers": 2, "head_dim": 16}
    config: dict[str, Any] = {
        "run": {
            "name": "share",
            "output_dir": str(folder),
            "max_rounds": args.rounds,
            "device": "cpu",
            "num_threads": 1,
        },
        "model": {"build": build},
        "data": {"train": [{"kind": "procedural", "generator": "chain_sum", "params": task, "size": 512}]},
        "reward": {"parts": [{"kind": "function", "path": f"{folder}/even.py:even"}]},
        "rollout": {
            "prompts_per_round": args.trajectories // 8,
            "group_size": 8,
            "sampling": {"max_new_tokens": length, "min_new_tokens": length},
        },
        "train": {"steps_per_pass": 2},
        "checkpoint": {"every_rounds": 0, "at_end": False},
        "cluster": {"runtime": "ray", "placement": {"policy": "0", "rollout": "1"}},
        "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
    }
    path = folder / "share.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


if __name__ == "__main__":
    main()
