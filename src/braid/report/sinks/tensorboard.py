"""TensorBoard event files, with the round as the horizontal axis."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import SampleRow

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorboardSink:
    """Writes scalars to `folder` once at least `queue` of them are pending. After a resume or a restart,
    TensorBoard shows the new points of repeated rounds."""

    name = "TensorBoard"

    def __init__(self, folder: Path, *, queue: int = 1, num_samples: int = 0) -> None:
        self._folder, self.num_samples = folder, num_samples
        self._queue = queue
        self._writer: SummaryWriter | None = None
        self._last_round = -1
        self._waiting: list[tuple[str, float | str, int]] = []
        """Names, values or texts, and rounds."""

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        if round_ <= self._last_round:
            self._repeat(round_)
        self._last_round = round_
        self._waiting += [(name, value, round_) for name, value in {"step": float(step), **flat}.items()]
        if len(self._waiting) >= self._queue:
            self._write()

    def log_samples(self, use: str, round_: int, samples: Sequence[SampleRow]) -> None:
        if round_ <= self._last_round:  # these precede the round's numbers
            self._repeat(round_)
            self._last_round = round_ - 1
        # as code, in which Markdown leaves line breaks and signs as they are
        blocks = (
            f"**{sample.uid}**: reward {sample.reward}, {sample.status}\n\n"
            + "\n\n".join(textwrap.indent(text, "    ") for text in (sample.prompt, sample.answer))
            for sample in samples
        )
        self._waiting.append((f"samples/{use}", "\n\n".join(blocks), round_))

    def close(self) -> None:
        if self._waiting:
            self._write()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _repeat(self, round_: int) -> None:
        """Tell TensorBoard to drop the points from `round_` on."""
        from tensorboard.compat.proto import event_pb2

        self._waiting = [point for point in self._waiting if point[2] < round_]
        if self._writer is not None and (file := self._writer.file_writer) is not None:
            events: Any = event_pb2  # generated, without types
            start = events.SessionLog(status=events.SessionLog.START)
            file.add_event(events.Event(session_log=start), step=round_)

    def _write(self) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second

            self._writer = SummaryWriter(str(self._folder), purge_step=self._waiting[0][2])
        for name, value, round_ in self._waiting:
            if isinstance(value, str):
                self._writer.add_text(name, value, round_)
            else:
                self._writer.add_scalar(name, value, round_)
        self._writer.flush()
        self._waiting.clear()
