"""Small tasks with a bar, learned through the whole loop.

    python benchmarks/learned.py [TASK ...] --seeds 0 1 2

Tasks are the configs of benchmarks/learned and some of examples; policies and demonstrations that they read are made first. The
runs take place one after another, each in a separate process. Prints each seed's result in the last evaluation, and also in the first
if the bar is a gain. Bars are in eval.target; the optimum, where it is known, is in a config's first line. A run that fails is reported
as such, and the others go on. Exits with 1 if a bar is missed or a run fails.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braid.config.load import load_config
from braid.config.report import EvalConfig
from braid.errors import ConfigError

CONFIGS = Path(__file__).parent / "learned"
EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Task:
    """A config with overrides; `vla` is the kind of the policy that examples/vla.py makes for it."""

    config: Path
    overrides: Sequence[str] = ()
    vla: str | None = None


TASKS = {path.stem: Task(path) for path in sorted(CONFIGS.glob("*.yaml"))} | {
    "cartpole": Task(EXAMPLES / "cartpole.yaml"),
    "openai_agent": Task(EXAMPLES / "openai_agent.yaml"),
    "reach": Task(EXAMPLES / "robot.yaml"),
    "reach_chunks": Task(EXAMPLES / "robot.yaml", ["model.mlp.num_action_chunks=5", "algorithm.gamma=0.87"]),
    "button_press": Task(EXAMPLES / "robot.yaml", ["env.task=button-press-v3", "eval.target.min_final=0.8"]),
    "vla": Task(EXAMPLES / "vla.yaml", vla="openvla_oft"),
    "pi0": Task(CONFIGS / "pi0.yaml", vla="pi0"),
}


@dataclass(frozen=True)
class Result:
    """`is_missed`: whether the run failed or missed its bar; nan stands for what a failed run did not get to."""

    is_missed: bool
    first: float = math.nan
    last: float = math.nan
    wall_s: float = math.nan


def prepare(task: Task, folder: Path) -> list[str]:
    """Make what the task's config reads; returns its overrides. A failure is reported, and shows again in the runs."""
    if task.vla is None:
        return list(task.overrides)
    command = [sys.executable, str(EXAMPLES / "vla.py"), str(folder), "--kind", task.vla]
    if code := subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        print(f"{folder.name}: examples/vla.py failed, exit code {code}", file=sys.stderr)
    return [*task.overrides, f"model.path={folder}/model", f"sft.demonstrations={folder}/demonstrations"]


def train(config: Path, metric: str, overrides: Sequence[str], folder: Path) -> Result:
    """Train a config, with the run in `folder`."""
    command = [sys.executable, "-m", "braid", "train", str(config), *overrides]
    command += [f"run.output_dir={folder.parent}", f"run.name={folder.name}", "report.console=none"]
    code = subprocess.run(command, check=False).returncode
    path = folder / "summary.json"
    summary: dict[str, Any] = {"status": "failed without a summary"}
    if path.exists():
        summary = json.loads(path.read_text())
    wall_s = summary.get("wall_s", math.nan)
    if summary["status"] not in ("finished", "not_learned"):
        print(f"{folder.name}: {summary['status']}, exit code {code}", file=sys.stderr)
        return Result(True, wall_s=wall_s)
    first, last = (summary["eval"][which].get("all", {}).get(metric, math.nan) for which in ("first", "last"))
    print(f"{folder.name}: {first:.3f} to {last:.3f}, {wall_s:.0f} s", file=sys.stderr)
    return Result(code != 0, first, last, wall_s)


def row(name: str, config: Path, of: EvalConfig, results: Sequence[Result]) -> str:
    """A row of the table."""
    optimum = re.search(r"[Oo]ptimum ([-+.\d]*\d)", config.read_text())
    bars = [
        f"{bar:{sign}g}"
        for bar, sign in ((of.target.min_final, ""), (of.target.min_gain, "+"))
        if bar is not None
    ]

    def text(result: Result) -> str:
        if math.isnan(result.last):
            return "failed"
        return (
            f"{result.last:.3f}" if of.target.min_gain is None else f"{result.first:.3f} to {result.last:.3f}"
        )

    seconds = ("-" if math.isnan(of.wall_s) else f"{of.wall_s:.0f}" for of in results)
    cells = [name, optimum[1] if optimum else "", " ".join([of.target_metric, *bars])]
    return f"| {' | '.join([*cells, ' / '.join(map(text, results)), ' / '.join(seconds)])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    if unknown := set(args.tasks) - TASKS.keys():
        parser.error(f"no such task: {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    is_missed = False
    print("| task | optimum | bar | result, by seed | wall time, s |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.tasks or TASKS:
            task, place = TASKS[name], Path(folder)
            overrides = prepare(task, place / name)
            try:
                of = load_config(task.config, overrides).config.eval
            except ConfigError:  # the runs say why
                of = EvalConfig()
            results = [
                train(
                    task.config, of.target_metric, [*overrides, f"run.seed={seed}"], place / f"{name}_{seed}"
                )
                for seed in args.seeds
            ]
            is_missed |= any(result.is_missed for result in results)
            print(row(name, task.config, of, results), flush=True)
    sys.exit(is_missed)


if __name__ == "__main__":
    main()
