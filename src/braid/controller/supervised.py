"""Supervised learning on worked examples, whole: alone under `braid sft`, or as the warm-up before reinforcement.

A round is one optimizer step over `rows_per_step` examples. The loss is the cross-entropy of what the policy is to
write, token by token; prompts and environment replies are context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from braid.algorithms.aggregate import row_weights
from braid.data.sampler import PromptSampler
from braid.report.metrics import Metrics
from braid.training.group import GroupBackend
from braid.training.losses import supervised_loss
from braid.types import Row

from . import steps
from .parts import Parts


@dataclass
class Supervised:
    """Examples, the order to take them in, and what learns from them: made when it is first asked for."""

    rows: Sequence[Row]
    sampler: PromptSampler
    new_backend: Callable[[], GroupBackend]
    num_steps: int
    rows_per_step: int

    @cached_property
    def backend(self) -> GroupBackend:
        return self.new_backend()

    def learn(self, metrics: Metrics) -> None:
        """One optimizer step."""
        batch = [self.rows[i] for i in self.sampler.take(self.rows_per_step)]
        weights = row_weights(
            [row.num_tokens for row in batch], list(range(len(batch))), mode="token_mean", constant=None
        )
        steps.record(metrics, "sft", self.backend.train(batch, weights, supervised_loss()))


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
        sft.learn(parts.metrics)
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
