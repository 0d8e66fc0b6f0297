"""TensorBoard event files. The horizontal axis is the round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardSink:
    """Writes scalars to `folder`. After a resume, TensorBoard shows the new points of rounds that were done twice."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second

            self._writer = SummaryWriter(str(self._folder), purge_step=round_)
        for name, value in {"step": float(step), **flat}.items():
            self._writer.add_scalar(name, value, round_)
        self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
