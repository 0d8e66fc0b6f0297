"""Construction of a run's sinks, other than the console."""

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
    tensorboard_samples: int = 0,
    wandb: Tracker | None = None,
    swanlab: Tracker | None = None,
) -> list[Sink]:
    """Build the metrics.jsonl sink and the requested others, with their files in `folder` (None: the run
    folder). `tensorboard_queue=None` disables TensorBoard, which shows `tensorboard_samples` trajectories as
    text. Raises ConfigError when a tracker does not start."""
    home = run_dir.path if folder is None else folder
    home.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonlSink(run_dir.metrics)]
    if tensorboard_queue is not None:
        sinks.append(
            TensorboardSink(home / "tensorboard", queue=tensorboard_queue, num_samples=tensorboard_samples)
        )
    if wandb is not None:
        sinks.append(WandbSink(wandb, folder=home, id_file=run_dir.path / ".wandb_id"))
    if swanlab is not None:
        sinks.append(SwanlabSink(swanlab, folder=home, id_file=run_dir.path / ".swanlab_id"))
    return sinks
