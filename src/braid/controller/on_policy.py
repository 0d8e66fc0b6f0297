"""On-policy reinforcement learning, whole.

    prompts ─gather─> scored groups ─credit─> rows ─improve─> new weights ─publish─> the next round

One round is one rollout batch with its optimizer steps; gathering draws more batches where the filter asks for it. What
always holds:

1. Every token of a round was sampled from the weights that the round starts with (version = round - 1).
2. The engine holds version r before any prompt of round r + 1 is sampled.
3. Invalid trajectories reach neither rewards, baselines nor denominators; dropped groups reach nothing.
4. A checkpoint holds the state between two rounds, or between a round's update and its evaluation, or between two steps of the
   warm-up. Resuming from it continues the run; a round that cannot end in time when the run is told to stop is given up.

The verbs are in steps.py; what they work on is built by build.py from the plan. Language models and simulators differ
in the parts, not here.
"""

from __future__ import annotations

from . import steps
from .parts import Parts


def run(parts: Parts) -> None:
    """Train from where `parts.progress` stands to the last round of the plan."""
    progress = parts.progress
    if not progress.is_warm:
        steps.warm_up(parts)
    while not (progress.is_reported and progress.round == parts.plan.num_rounds):
        steps.stop_if_asked(parts)
        if progress.is_reported:
            _train_round(parts)
        _report_round(parts)


def _train_round(parts: Parts) -> None:
    """A round up to its new weights."""
    with steps.given_up_when_late(parts):
        parts.progress.round += 1
        selection = steps.gather(parts)
        parts.stop.check_time(parts.update_s)
    with steps.timed_update(parts):
        rows = steps.credit(parts, selection)
        steps.improve(parts, rows)
        steps.steer_kl(parts, rows)
        steps.publish(parts)
        steps.update_reference(parts)
        steps.store(parts, selection, rows)
    parts.progress.is_reported = False


def _report_round(parts: Parts) -> None:
    """The rest of the round. Before the first one: what there is to tell of the policy that it starts with."""
    config, round_ = parts.config, parts.progress.round
    is_last = round_ == parts.plan.num_rounds
    cadence = parts.is_due(config.eval.every_rounds, is_last and config.eval.at_end)
    with steps.given_up_when_late(parts):
        steps.evaluate(parts, is_due=cadence if round_ else config.eval.before)
    if round_:
        steps.export(parts)
    steps.report(parts)
    steps.save(
        parts,
        is_due=parts.is_due(config.checkpoint.every_rounds, is_last and config.checkpoint.at_end),
    )
