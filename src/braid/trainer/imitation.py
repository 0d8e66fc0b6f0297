"""The loop on data that exists before the run (`braid sft` and `braid prefer`), where a round is one
optimizer step; and supervised learning as the warm-up before others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from braid.report.metrics import Metrics

from .run import Run
from .supervised import Supervised


class Learnable(Protocol):
    """Data with the model that learns from it: supervised examples, or preference pairs."""

    @property
    def held_out(self) -> Mapping[str, Sequence[Any]]:
        """What evaluations measure, by source."""
        ...

    def learn(self) -> Metrics:
        """Take one optimizer step."""
        ...

    def evaluate(self) -> Metrics:
        """Measure what is held out."""
        ...


@dataclass(frozen=True)
class RunOnData(Run):
    """A run whose training data exists beforehand."""

    data: Learnable

    @property
    def has_evaluation(self) -> bool:
        return super().has_evaluation or bool(self.data.held_out)

    def take_steps(self) -> None:
        """Take the optimizer steps from `progress` to the last, each a round."""
        progress = self.progress
        while not progress.is_complete:
            progress.stop_if_asked()
            if progress.counters.is_reported:
                progress.start_round()
                with progress.stop.finishing():
                    progress.metrics.merge(self.data.learn())
                progress.advance(step=progress.counters.step + 1, is_reported=False)
            self.finish_round()

    def evaluate(self) -> Metrics:
        """Measure what is held out, and sample answers to the evaluation's prompts if there are any. Weights
        are synced only here, since nothing else samples."""
        metrics = Metrics()
        if self.data.held_out:
            with self.progress.reports.timed("evaluate", metrics):
                metrics.merge(self.data.evaluate())
        if self.evaluation.prompts:
            self.sync_weights()
            metrics.merge(super().evaluate())
        return metrics


@dataclass(frozen=True)
class Imitation(RunOnData):
    """`braid sft`."""

    data: Supervised

    def run(self) -> None:
        """Train from `progress` to the last step."""
        if not self.progress.counters.is_warm:
            self.progress.advance(is_warm=True, is_reported=False)
        self.take_steps()


def warm_up(run: Run) -> None:
    """Run the supervised warm-up if the run has one; then copy the policy's weights to the reference and the
    critic."""
    models, progress = run.models, run.progress
    if (supervised := models.warm_up) is not None:
        models.rollouts.sleep()
        num_steps = supervised.num_steps
        timing = Metrics()
        with progress.reports.timed("warm_up", timing):
            while progress.counters.warm_steps < num_steps:
                progress.reports.reporter.progress("warm_up", progress.counters.warm_steps, num_steps)
                progress.metrics = Metrics()
                with progress.stop.finishing():
                    progress.metrics.merge(supervised.learn())
                progress.advance(warm_steps=progress.counters.warm_steps + 1)
                progress.save_by_time()
                progress.stop_if_asked()
        progress.metrics.merge(timing)
        models.follow_warm_up()
    progress.advance(is_warm=True, is_reported=False)
    run.sync_weights()
