"""CartPole-v1 under PPO, three seeds: mean return over 100 evaluation episodes and wall time of each run.

    python benchmarks/cartpole.py [SEED ...]

Runs `braid train examples/cartpole.yaml` once per seed, as a user would, and reads what the run left behind. The figure to
reach is a mean return of 475 for each of the seeds 0, 1 and 2. Exits with 1 when one is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "cartpole.yaml"
GOAL = 475.0


def train(seed: int, folder: Path) -> tuple[float, float]:
    """Mean return of the last evaluation, and seconds of wall time."""
    command = [str(Path(sys.executable).with_name("braid")), "train", str(EXAMPLE)]
    overrides = [
        f"run.seed={seed}",
        f"run.output_dir={folder}",
        f"run.name=seed{seed}",
        "report.console=none",
    ]
    done = subprocess.run([*command, *overrides], check=False)
    summary = json.loads((folder / f"seed{seed}" / "summary.json").read_text())
    print(f"seed {seed}: exit code {done.returncode}, {summary['status']}")
    return summary["eval"]["last"]["all"]["mean@1"], summary["wall_s"]


def main() -> None:
    seeds = [int(seed) for seed in sys.argv[1:]] or [0, 1, 2]
    with tempfile.TemporaryDirectory() as folder:
        results = {seed: train(seed, Path(folder)) for seed in seeds}
    print("seed   mean return   wall time")
    for seed, (value, wall_s) in results.items():
        print(f"{seed:>4}   {value:>11.1f}   {wall_s:>7.0f} s")
    sys.exit(any(value < GOAL for value, _ in results.values()))


if __name__ == "__main__":
    main()
