"""Processes for tests, forked from one that has imported what workers import.

Importing torch and transformers takes a new process several seconds; it happens once for all tests. The forks
of one test share nothing with those of another.
"""

from __future__ import annotations

import multiprocessing
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

MEGATRON_CPU = Path(__file__).parent / "megatron_cpu"

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "braid.training.worker",
        "braid.trainer.commands",
        "braid.trainer.build",
        "reasoning_gym",
        "torch.utils.tensorboard",
    ]
)


def run_ranks(function: Callable[..., None], *args: Any, num_ranks: int = 2) -> None:
    """Run `function(rank, *args)` in that many processes; raises the first error."""
    mp.start_processes(function, args, num_ranks, start_method="forkserver")


def use_megatron_on_cpu() -> None:
    """In a fork, before it imports Megatron-core: see tests/megatron_cpu."""
    runpy.run_path(str(MEGATRON_CPU / "sitecustomize.py"))
