"""Supervised learning alone, whole. A round is one optimizer step."""

from __future__ import annotations

from . import steps
from .parts import Parts


def run(parts: Parts) -> None:
    """`braid sft`: train from where `parts.progress` stands to the last step."""
    sft, progress, config = parts.supervised, parts.progress, parts.config
    assert sft is not None, "build.py makes it for this verb"
    if progress.round == 0:
        _evaluate(parts, is_due=config.eval.before)
        steps.report(parts)
    while progress.round < sft.num_steps:
        progress.round += 1
        progress.step += 1
        is_last = progress.round == sft.num_steps
        steps.record(parts.metrics, "sft", sft.learn())
        _evaluate(parts, is_due=parts.is_due(config.eval.every_rounds, is_last and config.eval.at_end))
        steps.export(parts)
        steps.report(parts)
        steps.save(
            parts, is_due=parts.is_due(config.checkpoint.every_rounds, is_last and config.checkpoint.at_end)
        )


def _evaluate(parts: Parts, *, is_due: bool) -> None:
    """Nothing else samples here, so that weights are handed over for this alone."""
    if is_due and parts.eval_prompts:
        steps.publish(parts)
        steps.evaluate(parts, is_due=True)
