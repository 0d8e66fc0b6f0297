"""`braid eval`: one evaluation of the config's model, or of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from braid.training.backend import TrainingBackend

from .run import Run


class Trained(NamedTuple):
    """The policy in a checkpoint: its weights, the checkpoint's folder, and the config of the run that saved
    it. `scores` are the mean and std of those of a reward model; None for a policy."""

    weights: Mapping[str, torch.Tensor]
    folder: Path
    config: str
    scores: Mapping[str, float] | None = None


@dataclass(frozen=True)
class EvaluationRun(Run):
    """Evaluates the policy with the weights of `trained`; without it, those of the config's model."""

    trained: Trained | None

    def run(self) -> None:
        """Load, sync, evaluate and report."""
        progress, trained = self.progress, self.trained
        progress.reports.reporter.tell_evaluated(None if trained is None else trained.folder)
        if trained is not None:
            self.models.policy.ranks.call(TrainingBackend.load_weights, trained.weights)
        with progress.reports.timed("sync_weights", progress.metrics):
            self.models.sync_weights(progress.round)
        if self.evaluation.prompts:
            progress.metrics.merge(self.evaluate())
        self.report()
