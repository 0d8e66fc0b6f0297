"""Which sinks a run has beside the console."""

from __future__ import annotations

from pathlib import Path

from braid.report.run_dir import RunDir

from .base import Sink, Tracker
from .jsonl import JsonlSink
from .swanlab import SwanlabSink
from .tensorboard import TensorboardSink
from .wandb import WandbSink


def build_sinks(
    run_dir: RunDir,
    *,
    folder: Path | None = None,
    tensorboard_queue: int | None,
    wandb: Tracker | None = None,
    swanlab: Tracker | None = None,
) -> list[Sink]:
    """metrics.jsonl always, the others as asked for, with their files in `folder` (the run's own when None). A queue of None is
    no TensorBoard. Raises ConfigError when a tracker is missing or does not start."""
    home = run_dir.path if folder is None else folder
    home.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonlSink(run_dir.metrics)]
    if tensorboard_queue is not None:
        sinks.append(TensorboardSink(home / "tensorboard", queue=tensorboard_queue))
    if wandb is not None:
        sinks.append(WandbSink(wandb, folder=home, id_file=run_dir.path / ".wandb_id"))
    if swanlab is not None:
        sinks.append(SwanlabSink(swanlab, folder=home, id_file=run_dir.path / ".swanlab_id"))
    return sinks
