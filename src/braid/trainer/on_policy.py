"""The loop of on-policy reinforcement learning.

    prompts ─rollout─> scored groups ─compute advantages─> rows ─update─> weights ─sync weights─> the next
    round

One round is one rollout batch with its optimizer steps; the rollout draws more batches if the filter asks for
it. Invariants:

1. Every token of a round is sampled from the weights at the start of the round (version = round - 1).
2. The engine has version r before any prompt of round r + 1 is sampled.
3. Invalid trajectories enter neither rewards, baselines nor denominators; dropped groups enter nothing.
4. A checkpoint holds the state between two rounds, between a round's update and its evaluation, or between
   two steps of the warm-up. A resume continues the run from there. When the run is asked to stop, a round
   that cannot finish in time is abandoned.

Sampling samples and scores, Learner computes advantages and updates; Models syncs weights, Progress reports
and saves. A stage returns what it made, with its metrics. build.py builds them from the plan. Language models
and simulators differ in the workers, not in the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from braid.report.metrics import Metrics
from braid.types import RowMetadata

from .imitation import warm_up
from .learner import Learner
from .progress import Counters
from .run import Run
from .selection import Selection


@dataclass(frozen=True)
class OnPolicy(Run):
    """`braid train` without a pipeline."""

    learner: Learner

    def run(self) -> None:
        """Train from `progress` to the last round of the plan."""
        progress = self.progress
        if not progress.counters.is_warm:
            warm_up(self)
        while not progress.is_complete:
            progress.stop_if_asked()
            if progress.counters.is_reported:  # else a resume goes on with the end of the round
                with progress.given_up_when_late():
                    progress.start_round()
                    selection = self.sampling.rollout(progress.round)
                    progress.check_time()
                    with progress.stop.cuttable():
                        rows, fetching = self.learner.fetch_rows(selection)
                progress.metrics.merge(Metrics.merged(selection.metrics, fetching))
                with progress.timed_update():
                    with progress.stop.finishing():
                        progress.end_update(*self.train(selection, rows))
                    self.sync_weights()
            self.finish_round()

    def train(self, selection: Selection, rows: Sequence[RowMetadata]) -> tuple[Counters, Metrics]:
        """Train on the groups of the round, whose `rows` were fetched. Returns the counters after it."""
        learner, sampler, before = self.learner, self.sampling.sampler, self.progress.counters
        learner.checks.begin(before.round)
        learner.check_rows(selection, rows)
        trained, metrics = learner.compute_advantages(rows, before.kl_coef)
        empty_rounds = learner.count_empty(before, selection, trained)
        num_steps = 0
        if trained:
            with learner.timed_update(trained) as updating:
                learner.update_critic(trained, before, updating)
                num_steps = learner.update_policy(trained, before, updating)
            metrics = Metrics.merged(metrics, updating)
        kl_coef, steering = learner.steer_kl(before.kl_coef, metrics, trained)
        reference_updates = self.models.update_reference(sampler.epoch, before.reference_updates)
        learner.store(before.round, selection, trained)
        after = replace(
            before,
            step=before.step + num_steps,
            empty_rounds=empty_rounds,
            kl_coef=kl_coef,
            reference_updates=reference_updates,
            is_reported=False,
        )
        metrics = Metrics.merged(metrics, steering)
        learner.checks.evidence.groups = selection.kept
        learner.checks.evidence.metrics = metrics.flat()
        learner.checks.judge()
        return after, metrics

    def report(self) -> None:
        """Write the metrics of the round. Raises CheckTripped with checks.on_trip=stop."""
        super().report()
        self.learner.checks.stop_if_tripped()
