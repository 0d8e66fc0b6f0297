"""Small games with a known optimum, learned through the whole loop.

    python benchmarks/learned.py [TASK ...] --seeds 0 1 2

Trains each config of benchmarks/learned in a process of its own, one after the other, and prints the mean score of its last
evaluation per seed. Optimum and task are in the first line of a config, the bar in eval.target.min_final. Exits with 1
if one is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

CONFIGS = Path(__file__).parent / "learned"


def train(config: Path, seed: int, folder: Path) -> tuple[float, float]:
    """Mean score of the last evaluation, nan if there is none, and seconds of wall time."""
    name = f"{config.stem}_{seed}"
    command = [sys.executable, "-m", "braid", "train", str(config), f"run.seed={seed}", f"run.name={name}"]
    command += [f"run.output_dir={folder}", "report.console=none"]
    subprocess.run(command, check=False)
    summary = json.loads((folder / name / "summary.json").read_text())
    final = summary["eval"].get("last", {}).get("all", {}).get("mean@1", float("nan"))
    print(f"{name}: {final:.3f}, {summary['wall_s']:.0f} s", file=sys.stderr)
    return final, summary["wall_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    tasks = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
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
            values, seconds = (
                " / ".join(f"{value:.3f}" for value, _ in results),
                " / ".join(f"{wall_s:.0f}" for _, wall_s in results),
            )
            print(
                f"| {config.stem} | {optimum[1] if optimum else ''} | {bar} | {values} | {seconds} |",
                flush=True,
            )
    sys.exit(is_missed)


if __name__ == "__main__":
    main()
