"""On-policy reinforcement learning, whole.

    prompts ─gather─> scored groups ─credit─> rows ─improve─> new weights ─publish─> the next round

One round is one rollout batch with its optimizer steps; gathering draws more batches where the filter asks for it. What
always holds:

1. Every token of a round was sampled from the weights that the round starts with (version = round - 1).
2. The engine holds version r before any prompt of round r + 1 is sampled.
3. Invalid trajectories reach neither rewards, baselines nor denominators; dropped groups reach nothing.
4. A checkpoint holds the state between two rounds and nothing else, so that resuming is going on.

The verbs are in steps.py; what they work on is built by build.py from the plan. Language models and simulators differ
in the parts, not here.
"""

from __future__ import annotations

from . import steps
from .parts import Parts


def run(parts: Parts) -> None:
    """Train from where `parts.progress` stands to the last round of the plan."""
    plan, progress = parts.plan, parts.progress
    if progress.round == 0 and not progress.is_warm:
        steps.warm_up(parts)
        steps.evaluate(parts, is_due=parts.config.eval.before)
        steps.report(parts)
        steps.save(parts, is_due=parts.config.checkpoint.every_rounds > 0)
    while progress.round < plan.num_rounds:
        progress.round += 1
        is_last = progress.round == plan.num_rounds
        selection = steps.gather(parts)
        rows = steps.credit(parts, selection)
        steps.improve(parts, rows)
        steps.steer_kl(parts, rows)
        steps.publish(parts)
        steps.update_reference(parts)
        steps.store(parts, selection, rows)
        steps.evaluate(
            parts, is_due=parts.is_due(parts.config.eval.every_rounds, is_last and parts.config.eval.at_end)
        )
        steps.export(parts)
        steps.report(parts)
        steps.save(
            parts,
            is_due=parts.is_due(
                parts.config.checkpoint.every_rounds, is_last and parts.config.checkpoint.at_end
            ),
        )
