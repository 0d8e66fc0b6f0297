"""The time of `braid explain` on the pages' files, from the shell's point of view: a new process each time.

It has to stay under 2 seconds, and to import neither torch nor ray (tests/architecture/test_light_imports.py). The best of
several runs is what the command takes on a machine that does nothing else.

    python benchmarks/explain.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

SEEDS = Path(__file__).parents[1] / "tests/dialects/seeds"
FILES = ("rlinf-math-000", "rlinf-math-003", "rlinf-embodied-003", "roll-rlvr-002", "skyrl-004")
LIMIT_S = 2.0


def seconds(name: str) -> float:
    """Wall time of one command."""
    command = [sys.executable, "-m", "braid.cli.main", "explain", str(SEEDS / f"{name}.yaml")]
    environment = {**os.environ, "REPO_PATH": "/opt/rlinf"}
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    sys.stdout.write(f"{'file':<20}{'best s':>8}{'worst s':>9}\n")
    slowest = 0.0
    for name in FILES:
        times = [seconds(name) for _ in range(repeats)]
        slowest = max(slowest, min(times))
        sys.stdout.write(f"{name:<20}{min(times):>8.2f}{max(times):>9.2f}\n")
    return int(slowest >= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
