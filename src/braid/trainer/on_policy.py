"""The loop of on-policy reinforcement learning.

    prompts ─rollout─> scored groups ─compute advantages─> rows ─update─> weights ─sync weights─> the next round

One round is one rollout batch with its optimizer steps; the rollout draws more batches if the filter asks for
it. Invariants:

1. Every token of a round is sampled from the weights at the start of the round (version = round - 1).
2. The engine has version r before any prompt of round r + 1 is sampled.
3. Invalid trajectories enter neither rewards, baselines nor denominators; dropped groups enter nothing.
4. A checkpoint holds the state between two rounds, between a round's update and its evaluation, or between two
   steps of the warm-up. A resume continues the run from there. When the run is asked to stop, a round that cannot
   finish in time is abandoned.

The stages are in steps.py, checkpoints in saving.py; build.py builds their operands from the plan. Language models and simulators
differ in the parts, not in the loop.
"""

from __future__ import annotations

from . import saving, steps
from .parts import Parts


def run(parts: Parts) -> None:
    """Train from `parts.progress` to the last round of the plan."""
    progress = parts.progress
    if not progress.is_warm:
        steps.warm_up(parts)
    while not (progress.is_reported and progress.round == parts.plan.num_rounds):
        saving.stop_if_asked(parts)
        if progress.is_reported:
            _train_round(parts)
        steps.finish_round(parts)


def _train_round(parts: Parts) -> None:
    """Run a round up to the sync of its new weights."""
    with saving.given_up_when_late(parts):
        parts.progress.round += 1
        selection = steps.rollout(parts)
        parts.stop.check_time(parts.update_s)
        with parts.stop.cuttable():
            rows = steps.fetch_rows(parts, selection)
    with steps.timed_update(parts):
        with parts.stop.finishing():
            steps.train(parts, selection, rows)
        saving.sync_weights(parts)
