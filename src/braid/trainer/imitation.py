"""The loop of supervised learning (`braid sft`). A round is one optimizer step."""

from __future__ import annotations

from . import evaluation, saving, steps
from .parts import Parts


def run(parts: Parts) -> None:
    """`braid sft`: train from `parts.progress` to the last step."""
    sft, progress, config = parts.supervised, parts.progress, parts.config
    assert sft is not None, "build.py makes it for this verb"
    if not progress.is_warm:
        progress.is_warm, progress.is_reported = True, False
    while not (progress.is_reported and progress.round == sft.num_steps):
        saving.stop_if_asked(parts)
        if progress.is_reported:
            progress.round += 1
            progress.step += 1
            with parts.stop.finishing():
                steps.record(parts.metrics, "sft", sft.learn())
            progress.is_reported = False
        is_last = progress.round == sft.num_steps
        cadence = parts.is_due(config.eval.every_rounds, is_last and config.eval.at_end)
        with saving.given_up_when_late(parts):
            _evaluate(parts, is_due=cadence if progress.round else config.eval.before)
        if progress.round:
            steps.export(parts)
        steps.report(parts)
        saving.save(
            parts, is_due=parts.is_due(config.checkpoint.every_rounds, is_last and config.checkpoint.at_end)
        )


def _evaluate(parts: Parts, *, is_due: bool) -> None:
    """Evaluate if due. Weights are synced only here, since nothing else samples."""
    if is_due and parts.eval_prompts:
        saving.sync_weights(parts)
        evaluation.evaluate(parts, is_due=True)
