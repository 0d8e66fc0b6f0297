"""Small games with a known optimum, learned through the whole loop.

    python benchmarks/learned.py [TASK ...] --seeds 0 1 2

Trains each config of benchmarks/learned that has a bar in a process of its own, one after the other, and prints the mean score of its last
evaluation per seed. Optimum and task are in the first line of a config, the bar in eval.target.min_final. A run that
fails is reported as such, and the others go on. Exits with 1 if a bar is missed or a run fails.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).parent / "learned"


def train(config: Path, seed: int, folder: Path) -> tuple[float, float]:
    """Mean score of the last evaluation, and seconds of wall time; nan for what a failed run did not get to."""
    name = f"{config.stem}_{seed}"
    command = [sys.executable, "-m", "braid", "train", str(config), f"run.seed={seed}", f"run.name={name}"]
    command += [f"run.output_dir={folder}", "report.console=none"]
    code = subprocess.run(command, check=False).returncode
    path = folder / name / "summary.json"
    summary: dict[str, Any] = {"status": "failed without a summary"}
    if path.exists():
        summary = json.loads(path.read_text())
    if summary["status"] not in ("finished", "not_learned"):
        print(f"{name}: {summary['status']}, exit code {code}", file=sys.stderr)
        return math.nan, summary.get("wall_s", math.nan)
    final = summary["eval"].get("last", {}).get("all", {}).get("mean@1", math.nan)
    print(f"{name}: {final:.3f}, {summary['wall_s']:.0f} s", file=sys.stderr)
    return final, summary["wall_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    tasks = sorted(path.stem for path in CONFIGS.glob("*.yaml") if "min_final" in path.read_text())
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(tasks)}; all by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    is_missed = False
    print("| task | optimum | bar | final, by seed | wall time, s |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for config in (CONFIGS / f"{task}.yaml" for task in args.tasks or tasks):
            text = config.read_text()
            optimum = re.search(r"[Oo]ptimum ([-+.\d]*\d)", text)
            bar = yaml.safe_load(text)["eval"]["target"]["min_final"]
            results = [train(config, seed, Path(folder)) for seed in args.seeds]
            is_missed |= not all(value >= bar for value, _ in results)
            values = " / ".join("failed" if math.isnan(value) else f"{value:.3f}" for value, _ in results)
            seconds = " / ".join("-" if math.isnan(wall_s) else f"{wall_s:.0f}" for _, wall_s in results)
            print(
                f"| {config.stem} | {optimum[1] if optimum else ''} | {bar} | {values} | {seconds} |",
                flush=True,
            )
    sys.exit(is_missed)


if __name__ == "__main__":
    main()
