"""The CPU time of `braid explain` on the pages' files and on one with unknown keys, each in a new process.

It has to stay under a second, and to import neither torch nor ray (tests/architecture/test_light_imports.py).
The best of several runs is what the command takes on a machine that does nothing else.

    python benchmarks/explain.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SEEDS = Path(__file__).parents[1] / "tests/dialects/seeds"
FILES = ("rlinf-math-000", "rlinf-math-003", "rlinf-embodied-003", "roll-rlvr-002", "skyrl-004")
UNKNOWN_KEYS = """
rollout_batch_size: 64
variants:
  first:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 16, param_dtype: bf16, reduce_dtype: fp32, reshard_after_forward: true}
  second:
    strategy_name: sglang
    strategy_config: {mem_fraction_static: 0.6, load_format: dummy, offload_policies: false}
  third:
    strategy_name: hf_infer
    strategy_config: {}
actor_train: {data_arg: {file_name: x}, training_args: {learning_rates: 1.0e-6}}
"""
"""A file of ROLL with 13 unknown keys."""
LIMIT_S = 1.0


def seconds(path: Path) -> float:
    """CPU time of one command."""
    command = [sys.executable, "-m", "braid.cli.main", "explain", str(path)]
    environment = {**os.environ, "REPO_PATH": "/opt/rlinf"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if b"\n" not in done.stdout:
        sys.exit(done.stderr.decode())
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    sys.stdout.write(f"{'file':<20}{'best s':>8}{'worst s':>9}\n")
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        unknown = Path(folder) / "unknown keys.yaml"
        unknown.write_text(UNKNOWN_KEYS)
        for path in [*(SEEDS / f"{name}.yaml" for name in FILES), unknown]:
            times = [seconds(path) for _ in range(repeats)]
            slowest = max(slowest, min(times))
            sys.stdout.write(f"{path.stem:<20}{min(times):>8.2f}{max(times):>9.2f}\n")
    return int(slowest >= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
