"""Disk that a run takes: checkpoints, exports and samples, at most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from braid.config.schema import RunConfig

from .plan import Plan
from .sizes import BYTES

_SAMPLE_BYTES, _SAMPLE_TOKEN_BYTES = 600, 80
"""Of a trajectory in samples/, and of each of its tokens: measured on the quickstart."""


@dataclass(frozen=True, slots=True)
class Files:
    """Bytes of `what` a run writes, and how they come about."""

    what: str
    num_bytes: int
    how: str


def plan_disk(config: RunConfig, plan: Plan) -> list[Files]:
    """What the run writes, at full length. Samples of an unknown number of rounds are those of one round."""
    files: list[Files] = []
    if (each := checkpoint_bytes(config, plan)) and plan.verb != "eval":
        keep = config.checkpoint.keep
        num = (1 if keep is None else keep) + 1 + config.checkpoint.keep_best
        how = f"{num} x {each:,} bytes: " + (
            "checkpoint.keep is null, so that each save adds one" if keep is None else f"keep {keep}"
        )
        how += ", one more while it is written" + ", and the best one" * config.checkpoint.keep_best
        files.append(Files("checkpoints", num * each, how))
    every, rounds = config.checkpoint.export_every_rounds, plan.last_round
    if every and rounds and plan.num_parameters is not None:
        num = rounds // every
        size = plan.num_parameters * BYTES[config.model.dtype]
        files.append(Files("exports", num * size, f"{num} x {size:,} bytes"))
    every = config.report.samples_every_rounds
    if plan.verb == "train" and every and plan.max_trajectory_tokens is not None:
        num = 1 if rounds is None else math.ceil(rounds / every)
        tokens = plan.max_output_tokens or 0
        size = plan.trajectories_per_round * (_SAMPLE_BYTES + tokens * _SAMPLE_TOKEN_BYTES)
        how = f"{num} rounds of {plan.trajectories_per_round:,} trajectories of at most {tokens:,} tokens"
        files.append(Files("samples", num * size, how))
    return files


def checkpoint_bytes(config: RunConfig, plan: Plan) -> int:
    """Bytes of a checkpoint: the trained weights in fp32, and the optimizer's moments."""
    moments = 0 if config.train.optimizer.kind == "sgd" else 2
    return (1 + moments) * sum(memory.gradients_bytes for memory in plan.memory)


def free_disk(config: RunConfig) -> int:
    """Free bytes where the run's folder will be."""
    return disk_usage(existing_folder(config)).free


def existing_folder(config: RunConfig) -> Path:
    """The folder of runs, or the nearest one above it that exists."""
    folder = Path(config.run.output_dir).expanduser().absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())
