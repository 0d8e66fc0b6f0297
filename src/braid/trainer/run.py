"""What every run has, whatever its loop: the end of a round, and the sync of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from braid.report.metrics import Metrics
from braid.rollout.engine import NewWeights

from .evaluation import Evaluation
from .models import Models
from .progress import Progress
from .reports import is_due
from .sampling import Sampling


@dataclass(frozen=True)
class Run(ABC):
    """A run that is built. Each kind has its own loop, `run`, which continues from `progress`."""

    models: Models
    sampling: Sampling
    evaluation: Evaluation
    progress: Progress

    @property
    def has_evaluation(self) -> bool:
        """Whether there is something to evaluate the policy on."""
        return bool(self.evaluation.prompts)

    @abstractmethod
    def run(self) -> None:
        """Run to the end."""

    def sync_weights(self, when: NewWeights = "drain") -> None:
        """Sync the policy's weights to the engines, `when` as in Engine.set_weights."""
        progress = self.progress
        with progress.cut_when_late(), progress.reports.timed("sync_weights", progress.metrics):
            self.models.sync_weights(progress.round, when)

    def finish_round(self) -> None:
        """Evaluate, export, report and save at the end of a round. Before the first round: evaluate and
        report the initial policy."""
        progress = self.progress
        with progress.given_up_when_late():
            is_last = progress.is_last_round
            if self.has_evaluation and self.evaluation.is_due(progress.round, is_last=is_last):
                progress.metrics.merge(self.evaluate())
        if progress.round:
            self.export()
        self.report()
        progress.save_round()

    def evaluate(self) -> Metrics:
        """Evaluate the policy."""
        return self.evaluation.evaluate(self.progress.round)

    def export(self) -> None:
        """Write the policy as a Hugging Face folder, in rounds that are a multiple of
        checkpoint.export_every_rounds."""
        progress, config = self.progress, self.progress.config
        if self.models.export is None or not is_due(progress.round, config.export_every_rounds):
            return
        exports = progress.reports.reporter.run_dir.exports
        home = exports if config.export_dir is None else Path(config.export_dir)
        with progress.reports.timed("export", progress.metrics), progress.stop.finishing():
            self.models.export(home / f"step_{progress.counters.step}")

    def report(self) -> None:
        """Write the metrics of the round."""
        metrics = self.progress.metrics
        metrics.mean("rollout/epoch", self.sampling.sampler.epoch)
        metrics.merge(self.models.flops_metrics())
        self.progress.report()
