"""How much longer a round takes beside busy processes.

    python benchmarks/busy.py [--busy 0 1 3] [--repeats 3] [--size 135m] [--prompts 4] [--env
    GOMP_SPINCOUNT=300000]

One run, in whose rounds other processes compute by turns: none, one, three. Prints each round's wall time,
the run's CPU time in it (a thread that spins while it waits takes CPU time for nothing), and the core time
that all other processes took, as a check that the machine was otherwise quiet; then the medians, and their
ratios to the quiet rounds. On two cores a fair share of them makes a round beside one busy process 1.5 times
as long, beside three 2.5 times. Goals: at most 1.7 and 2.8 times.

`--env` sets variables for the run, which braid leaves as they are: GOMP_SPINCOUNT=300000 is libgomp's own
default, to compare with. `--size 1m --prompts 16` is the quickstart's model, whose threads wait for each
other most often, after many short products.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SIZES = {
    "1m": {"hidden_size": 192, "intermediate_size": 512, "num_layers": 2, "num_heads": 6, "num_kv_heads": 6, "head_dim": 32},
    "30m": {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 10, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
}  # fmt: skip
"""Models with random weights; 135m has the shape of SmolLM2-135M, without most of its vocabulary."""
GROUP, MAX_NEW = 8, 64
TICKS = os.sysconf("SC_CLK_TCK")
POLL_S = 0.02


class Round(NamedTuple):
    """`own_s` and `others_s`: CPU time of the run, and of all processes but the run and those beside it."""

    busy: int
    wall_s: float
    own_s: float
    others_s: float


def config(folder: Path, size: str, prompts: int, rounds: int) -> dict[str, object]:
    """Rounds of the same size: all answers are cut at MAX_NEW tokens."""
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} + {i} ="}) + "\n" for i in range(64))
    )
    return {
        "run": {"name": "busy", "output_dir": str(folder), "max_rounds": rounds, "device": "cpu"},
        "model": {"build": {"architecture": "qwen3", "max_positions": 256, **SIZES[size]}},
        "data": {"train": [{"kind": "file", "path": "prompts.jsonl", "answer_key": None}], "use_chat_template": "never", "max_prompt_tokens": 32},
        "reward": {"parts": [{"kind": "function", "path": f"{Path(__file__).resolve()}:reward"}]},
        "rollout": {
            "prompts_per_round": prompts,
            "group_size": GROUP,
            "sampling": {"max_new_tokens": MAX_NEW, "min_new_tokens": MAX_NEW},
        },
        "train": {"optimizer": {"lr": 1e-6}},
        "eval": {"before": False, "at_end": False},
        "checkpoint": {"at_end": False},
        "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
    }  # fmt: skip


def reward(text: str) -> float:
    """Some signal within every group."""
    return len(text) % 7 / 7


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def machine_s() -> float:
    """CPU time of all processes so far."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(None, 4)[1:4])
    return (user + nice + system) / TICKS


def start_busy(number: int) -> list[subprocess.Popen[bytes]]:
    """Processes that compute until they are killed, or this one ends."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**6))"
    return [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]


def measure(process: subprocess.Popen[bytes], metrics: Path, plan: list[int]) -> Iterator[Round]:
    """A Round for each item of `plan`, the number of busy processes in that round. The first round of the run
    is left out."""
    wait_for_rounds(process, metrics, 1)
    for number, busy in enumerate(plan):
        before_s, everything = cpu_s(process.pid), machine_s()
        beside = start_busy(busy)
        try:
            wall_s = wait_for_rounds(process, metrics, number + 2)[-1]["time/round_s"]
            own_s = cpu_s(process.pid) - before_s
            others_s = machine_s() - everything - own_s - sum(cpu_s(other.pid) for other in beside)
        finally:
            for other in beside:
                other.kill()
                other.wait()
        yield Round(busy, wall_s, own_s, others_s)


def wait_for_rounds(process: subprocess.Popen[bytes], metrics: Path, number: int) -> list[dict[str, float]]:
    """Metrics of the run's first `number` rounds, as soon as they are written."""
    while True:
        text = metrics.read_text() if metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        rounds = [line for line in lines if line["round"] > 0]
        if len(rounds) >= number:
            return rounds[:number]
        if process.poll() is not None:
            sys.exit(f"the run ended early, with exit code {process.returncode}")
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 3])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", choices=list(SIZES), default="135m")
    parser.add_argument("--prompts", type=int, default=4, help="per round, each answered 8 times")
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    plan = [number for _ in range(args.repeats) for number in args.busy]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "busy.yaml").write_text(json.dumps(config(folder, args.size, args.prompts, len(plan) + 2)))
        process = subprocess.Popen(
            [sys.executable, "-m", "braid", "train", str(folder / "busy.yaml")],
            env={**os.environ, **dict(item.split("=", 1) for item in args.env)},
        )
        try:
            rounds = []
            for measured in measure(process, folder / "busy/metrics.jsonl", plan):
                rounds.append(measured)
                print(
                    f"{measured.busy} busy: {measured.wall_s:6.2f} s, CPU {measured.own_s:6.2f} s, other processes "
                    f"{measured.others_s:6.2f} s",
                    flush=True,
                )
        finally:
            process.terminate()
            process.wait()
    quiet = statistics.median(measured.wall_s for measured in rounds if measured.busy == min(args.busy))
    for number in args.busy:
        some = [measured for measured in rounds if measured.busy == number]
        wall, computed = (
            statistics.median(values)
            for values in zip(*((measured.wall_s, measured.own_s) for measured in some), strict=True)
        )
        print(
            f"median, {number} busy: {wall:6.2f} s, {wall / quiet:.2f} times the quiet round; CPU "
            f"{computed:6.2f} s"
        )


if __name__ == "__main__":
    main()
