"""Small tasks with a bar, learned through the whole loop.

    python benchmarks/learned.py [TASK ...] --seeds 0 1 2
    python benchmarks/learned.py quickstart --seeds 0-19 --jobs 8      (from a clone without `make setup`: PYTHONPATH=src:.)

Tasks are the configs of benchmarks/learned, among them a file of ROLL, and of examples; policies,
demonstrations and teachers that they read are made first, except the pretrained model of smollm2, smollm2_lora and
smollm2_tool: `make smollm2`. Each run has a process of its own; `--jobs` of them at a time divide the cores.
Prints each seed's result in the first evaluation, if there is one before training, and in the last, and the
ranges of both over the seeds. Bars are in eval.target; the optimum, where it is known, is in a config's first
line. A run that fails is reported as such, and the others go on. Exits with 1 if a bar is missed or a run
fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from braid.config.report import EvalConfig
from braid.cores import num_cores
from braid.errors import ConfigError
from braid.plan import Verb, default_verb
from braid_dialects.load import read_config, recognise

CONFIGS = Path(__file__).parent / "learned"
EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Task:
    """A config with overrides; `script` is the example that writes the files that it reads, whose paths
    relative to the script's folder `files` has by key. `vla` is the kind of the policy that examples/vla.py
    makes for it."""

    config: Path
    overrides: Sequence[str] = ()
    vla: str | None = None
    script: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


TASKS = {path.stem: Task(path) for path in sorted(CONFIGS.glob("*.yaml"))} | {
    "quickstart": Task(EXAMPLES / "quickstart.yaml"),
    "agent": Task(EXAMPLES / "agent.yaml"),
    "prefer": Task(EXAMPLES / "prefer.yaml"),
    "supervised": Task(EXAMPLES / "supervised.yaml"),
    "openai_agent": Task(EXAMPLES / "openai_agent.yaml"),
    "own_env": Task(EXAMPLES / "own_env.yaml"),
    "frozen_lake_short": Task(EXAMPLES / "frozen_lake.yaml"),
    "cartpole": Task(EXAMPLES / "cartpole.yaml"),
    "pendulum_sac": Task(EXAMPLES / "pendulum.yaml"),
    "reach": Task(EXAMPLES / "robot.yaml"),
    "reach_chunks": Task(
        EXAMPLES / "robot.yaml", ["model.mlp.num_action_chunks=5", "algorithm.advantage.gamma=0.87"]
    ),
    "button_press": Task(EXAMPLES / "robot.yaml", ["env.task=button-press-v3", "eval.target.min_final=0.8"]),
    **{name: Task(EXAMPLES / f"{name}.yaml") for name in ("smollm2", "smollm2_lora", "smollm2_tool")},
    "distillation": Task(
        EXAMPLES / "distillation.yaml", script="distillation.py", files={"reference.path": "teacher"}
    ),
    "pictures": Task(
        EXAMPLES / "pictures.yaml",
        script="pictures.py",
        files={
            "data.train[0].path": "train.jsonl",
            "data.eval[0].path": "eval.jsonl",
            "sft.data[0].path": "sft.jsonl",
        },
    ),
    "look_agent": Task(
        EXAMPLES / "look_agent.yaml", script="look_agent.py", files={"sft.data[0].path": "sft.jsonl"}
    ),
    **{
        name: Task(
            folder / f"{name}.yaml",
            vla=kind,
            script="vla.py",
            files={"model.path": "model", "sft.demonstrations": "demonstrations"},
        )
        for name, folder, kind in (("vla", EXAMPLES, "openvla_oft"), ("pi0", CONFIGS, "pi0"))
    },
}


@dataclass(frozen=True)
class Result:
    """`is_missed`: whether the run failed or missed its bar; nan stands for what a failed run did not get
    to."""

    is_missed: bool
    first: float = math.nan
    last: float = math.nan
    wall_s: float = math.nan


def prepare(task: Task, folder: Path) -> list[str]:
    """Make what the task's config reads; returns its overrides. A failure is reported, and shows again in the
    runs."""
    if task.script is None:
        return list(task.overrides)
    command = [sys.executable, str(EXAMPLES / task.script), str(folder)]
    command += [] if task.vla is None else ["--kind", task.vla]
    if code := subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        print(f"{folder.name}: examples/{task.script} failed, exit code {code}", file=sys.stderr)
    return [*task.overrides, *(f"{key}={folder}/{name}" for key, name in task.files.items())]


def train(
    config: Path, verb: Verb, metric: str, overrides: Sequence[str], jobs: int, folder: Path, seed: int
) -> Result:
    """Train a config by `braid VERB` with a seed, beside `jobs` - 1 others; the run is in a folder beside
    `folder`."""
    folder = folder.with_name(f"{folder.name}_{seed}")
    settings = [
        f"run.seed={seed}",
        f"run.output_dir={folder.parent}",
        f"run.name={folder.name}",
        "report.console=none",
    ]
    prefix = "" if recognise(config) == "native" else "braid."
    command = [
        sys.executable,
        "-m",
        "braid",
        verb,
        str(config),
        *overrides,
        *(f"{prefix}{key}" for key in settings),
    ]
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // jobs))} if jobs > 1 else {}
    code = subprocess.run(command, check=False, env={**threads, **os.environ}).returncode
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


def row(name: str, config: Path, config_eval: EvalConfig, results: Sequence[Result]) -> str:
    """A row of the table."""
    optimum = re.search(r"[Oo]ptimum ([-+.\d]*\d)", config.read_text())
    target = config_eval.target
    bars = [
        f"{words}{bar:{sign}g}"
        for words, bar, sign in (
            ("", target.min_final, ""),
            ("at most ", target.max_final, ""),
            ("", target.min_gain, "+"),
        )
        if bar is not None
    ]

    def text(result: Result) -> str:
        if math.isnan(result.last):
            return "failed"
        return (
            f"{result.last:.3f}" if math.isnan(result.first) else f"{result.first:.3f} to {result.last:.3f}"
        )

    seconds = ("-" if math.isnan(result.wall_s) else f"{result.wall_s:.0f}" for result in results)
    cells = [name, optimum[1] if optimum else "", " ".join([config_eval.target_metric, *bars])]
    return f"| {' | '.join([*cells, ' / '.join(map(text, results)), ' / '.join(seconds)])} |"


def ranges(name: str, results: Sequence[Result]) -> str:
    """The lowest and highest result of the seeds that did not fail, in the first evaluation and in the
    last."""
    finished = [result for result in results if not math.isnan(result.last)]
    parts = [
        f"{name}: {len(finished)} of {len(results)} seeds finished, {sum(result.is_missed for result in results)} "
        "missed the bar"
    ]
    for when in ("first", "last"):
        values = [value for result in finished if not math.isnan(value := getattr(result, when))]
        parts += [f"{when} {min(values):.3f} to {max(values):.3f}"] if values else []
    return "; ".join(parts)


def seeds_of(text: str) -> list[int]:
    """`7` is [7], `0-3` is [0, 1, 2, 3]."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; all by default")
    parser.add_argument("--seeds", nargs="+", type=seeds_of, default=[[0, 1, 2]], help="0 1 2, or 0-19")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 1 by default")
    args = parser.parse_args()
    seeds = [seed for some in args.seeds for seed in some]
    if unknown := set(args.tasks) - TASKS.keys():
        parser.error(f"no such task: {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    is_missed = False
    print("| task | optimum | bar | result, by seed | wall time, s |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.tasks or TASKS:
            task, place = TASKS[name], Path(folder)
            overrides = prepare(task, place / name)
            verb: Verb = "train"
            try:
                config = read_config(task.config, overrides).loaded.config
                config_eval, verb = config.eval, default_verb(config)
            except ConfigError:  # the runs say why
                config_eval = EvalConfig()
            metric = config_eval.target_metric
            run = partial(train, task.config, verb, metric, overrides, args.jobs, place / name)
            with ThreadPoolExecutor(args.jobs) as pool:
                results = list(pool.map(run, seeds))
            is_missed |= any(result.is_missed for result in results)
            print(row(name, task.config, config_eval, results), flush=True)
            print(ranges(name, results), file=sys.stderr, flush=True)
    sys.exit(is_missed)


if __name__ == "__main__":
    main()
