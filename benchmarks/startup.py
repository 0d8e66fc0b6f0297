"""How much longer a run on workers takes to start and to end than the same run in one process.

    python benchmarks/startup.py [--repeats 3]

The quickstart for one round, without warm-up and evaluation, from the shell: in one process, and with the
policy and the rollout on workers of their own, by turns. Told are the seconds of the whole command, and those
of them that are no work of the round (rollout, compute_advantages, update, sync_weights by the run's own
clock): reading libraries and data, starting and ending processes. Goal: at most 10 s more on workers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

_ROOT = Path(__file__).parent.parent
_SETTINGS = (
    *("run.max_rounds=1", "run.name=startup", "sft=null", "eval.target={}", "eval.before=false"),
    *("eval.every_rounds=0", "eval.at_end=false", "checkpoint.at_end=false", "report.console=none"),
)
_KINDS = {"one process": (), "on workers": ("cluster.placement={policy: 0, rollout: 1}",)}


def main() -> None:
    """Print a line for each run, then the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    for _ in range(args.repeats):
        for kind, settings in _KINDS.items():
            taken[kind].append(measure(settings))
            print(
                f"{kind:12} whole {taken[kind][-1][0]:6.2f} s, no work {taken[kind][-1][1]:6.2f} s",
                flush=True,
            )
    medians = {
        kind: [median(times_s) for times_s in zip(*times, strict=True)] for kind, times in taken.items()
    }
    for what, here, there in zip(("whole", "no work"), *medians.values(), strict=True):
        print(
            f"median {what:8} {here:6.2f} s in one process, {there:6.2f} s on workers, {there - here:+.2f} s"
        )


def measure(settings: tuple[str, ...]) -> tuple[float, float]:
    """(seconds of a command, seconds of it in which the round had no work done)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "-m",
            "braid.cli.main",
            "train",
            str(_ROOT / "examples/quickstart.yaml"),
            *_SETTINGS,
            *settings,
        ]
        start = time.perf_counter()
        subprocess.run([sys.executable, *command, f"run.output_dir={folder}"], check=True)
        whole = time.perf_counter() - start
        lines = (Path(folder) / "startup/metrics.jsonl").read_text().splitlines()
    work = sum(
        value
        for line in lines
        for name, value in json.loads(line).items()
        if name.startswith("time/") and name != "time/round_s"
    )
    return whole, whole - work


if __name__ == "__main__":
    main()
