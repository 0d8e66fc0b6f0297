"""The loop of supervised learning (`braid sft`) and of preferences, where a round is one optimizer step; and
supervised learning as the warm-up before others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from braid.report.metrics import Metrics
from braid.training.backend import StepReport

from .learner import record
from .run import Run
from .supervised import Supervised


@dataclass(frozen=True)
class Imitation(Run):
    """`braid sft`."""

    supervised: Supervised

    def run(self) -> None:
        """Train from `progress` to the last step."""
        if not self.progress.counters.is_warm:
            self.progress.advance(is_warm=True, is_reported=False)
        take_steps(self, "sft", self.supervised.learn)

    def evaluate(self) -> Metrics:
        """Evaluate the policy. Weights are synced only here, since nothing else samples."""
        self.sync_weights()
        return super().evaluate()


def take_steps(run: Run, name: str, learn: Callable[[], StepReport]) -> None:
    """Take the optimizer steps from `progress` to the last, each a round; metrics begin with `name`."""
    progress = run.progress
    while not progress.is_complete:
        progress.stop_if_asked()
        if progress.counters.is_reported:
            progress.start_round()
            with progress.stop.finishing():
                record(progress.metrics, name, learn())
            progress.advance(step=progress.counters.step + 1, is_reported=False)
        run.finish_round()


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
                    record(progress.metrics, "sft", supervised.learn())
                progress.advance(warm_steps=progress.counters.warm_steps + 1)
                progress.save_by_time()
                progress.stop_if_asked()
        progress.metrics.merge(timing)
        models.follow_warm_up()
    progress.advance(is_warm=True, is_reported=False)
    run.sync_weights()
