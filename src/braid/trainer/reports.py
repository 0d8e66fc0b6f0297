"""What a run writes of its rounds: metrics, memory, trajectories and rows; and the time of its stages."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from braid.cluster.memory_record import MemoryRecorder
from braid.report.metrics import Metrics
from braid.report.reporter import Reporter
from braid.training.backend import StepReport

from .watch import LearningWatch


def is_due(round_: int, every: int, *, is_end: bool = False) -> bool:
    """Whether a round is a multiple of `every` (0 for never), or `is_end`."""
    return is_end or (every > 0 and round_ % every == 0)


@dataclass(frozen=True, slots=True)
class Reports:
    """`reporter` writes, `watch` warns of signs that the run does not learn, `memory` records it with
    train.record_memory."""

    reporter: Reporter
    watch: LearningWatch
    memory: MemoryRecorder | None = None

    @contextmanager
    def timed(self, stage: str, metrics: Metrics) -> Iterator[None]:
        """Record the duration of a stage of the round in `metrics`, and its memory if asked to."""
        start = time.perf_counter()
        with self.reporter.phase(stage), self.memory.phase(stage) if self.memory else nullcontext():
            yield
        metrics.add(f"time/{stage}_s", time.perf_counter() - start)

    def log(self, round_: int, step: int, metrics: Metrics) -> None:
        """Write a round's metrics to all sinks."""
        metrics.max("memory/peak_rss_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if self.memory is not None:
            self.memory.write(round_)
        self.reporter.log(round_, step, metrics)
        self.watch.see(round_, metrics.flat())


def record(metrics: Metrics, role: str, report: StepReport) -> None:
    """Record the metrics of an optimizer step, under the role's name."""
    metrics.mean(f"{role}/loss", report.loss)
    if report.loss_scale is not None:
        metrics.mean(f"{role}/loss_scale", report.loss_scale)
        metrics.add(f"{role}/overflow_steps", int(report.is_overflow))
    if not report.is_overflow:
        metrics.mean(f"{role}/grad_norm", report.grad_norm)
    metrics.mean(f"{role}/lr", report.lr)
    metrics.add(f"{role}/skipped_steps", int(report.is_skipped and not report.is_overflow))
    for name, (total, count) in report.metrics.items():
        metrics.mean(name, total, count)
    for name, value in report.maxima.items():
        metrics.max(name, value)
