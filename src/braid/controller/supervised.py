"""Supervised learning on worked examples: alone under `braid sft` (imitation.py), or as the warm-up before reinforcement.

A step takes `rows_per_step` examples. The loss is the cross-entropy of what the policy is to
write, token by token; prompts and environment replies are context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from braid.algorithms.aggregate import row_weights
from braid.data.sampler import PromptSampler
from braid.training.backend import StepReport
from braid.training.group import GroupBackend
from braid.training.losses import supervised_loss
from braid.types import Row


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

    def learn(self) -> StepReport:
        """One optimizer step."""
        batch = [self.rows[i] for i in self.sampler.take(self.rows_per_step)]
        weights = row_weights(
            [row.num_tokens for row in batch], list(range(len(batch))), mode="token_mean", constant=None
        )
        return self.backend.train(batch, weights, supervised_loss())
