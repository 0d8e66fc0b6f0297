"""Which sinks a run has beside the console."""

from __future__ import annotations

from braid.report.run_dir import RunDir

from .base import Sink, Tracker
from .jsonl import JsonlSink
from .swanlab import SwanlabSink
from .tensorboard import TensorboardSink
from .wandb import WandbSink


def build_sinks(
    run_dir: RunDir, *, tensorboard: bool, wandb: Tracker | None = None, swanlab: Tracker | None = None
) -> list[Sink]:
    """metrics.jsonl always, the others as asked for. Raises ConfigError when a tracker is missing or does not start."""
    sinks: list[Sink] = [JsonlSink(run_dir.metrics)]
    if tensorboard:
        sinks.append(TensorboardSink(run_dir.tensorboard))
    if wandb is not None:
        sinks.append(WandbSink(wandb, run_name=run_dir.path.name, folder=run_dir.path))
    if swanlab is not None:
        sinks.append(SwanlabSink(swanlab, run_name=run_dir.path.name, folder=run_dir.path))
    return sinks
