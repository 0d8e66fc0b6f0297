"""Supervised learning on worked examples: alone under `braid sft` (imitation.py), or as the warm-up before
reinforcement learning.

A step takes `rows_per_step` examples. The loss is the token-level cross-entropy of the responses; prompts and
environment replies are context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from braid.algorithms.aggregate import row_weights
from braid.config.schema import RunConfig
from braid.data.rows import Lazy
from braid.data.sampler import PromptSampler
from braid.data.worked import Example
from braid.plan import Plan
from braid.training.backend import StepReport
from braid.training.group import ModelGroup
from braid.training.losses import supervised_loss
from braid.types import Row

from .inputs import TextInputs, prompt_sampler


@dataclass
class Supervised:
    """Examples, their sampling order, and the model trained on them, which is created on first use."""

    rows: Sequence[Row]
    sampler: PromptSampler
    new_model: Callable[[], ModelGroup]
    num_steps: int
    rows_per_step: int

    @cached_property
    def model(self) -> ModelGroup:
        return self.new_model()

    def learn(self) -> StepReport:
        """Take one optimizer step."""
        batch = [self.rows[i] for i in self.sampler.take(self.rows_per_step)]
        weights = row_weights(
            [row.num_tokens for row in batch], list(range(len(batch))), mode="token_mean", constant=None
        )
        return self.model.train(batch, weights, supervised_loss())


def supervised_of(
    config: RunConfig, plan: Plan, inputs: TextInputs | None, new_model: Callable[[], ModelGroup]
) -> Supervised | None:
    """Supervised learning as set by the config's `sft`; None without it, and for evaluations. Without
    `inputs`, of a robot policy. Raises DataError and ModelError."""
    sft = config.sft
    if sft is None or plan.verb == "eval":
        return None
    if inputs is None:
        from .demonstrations import demonstration_rows  # image and policy code that text runs do not need

        rows = demonstration_rows(config)
    else:
        rows = ExampleRows(inputs.examples.examples)
    return Supervised(
        rows=rows,
        sampler=PromptSampler(len(rows), seed=config.run.seed, shuffle=True),
        new_model=new_model,
        num_steps=plan.sft_steps,
        rows_per_step=sft.rows_per_step,
    )


class ExampleRows(Lazy[Row]):
    """Examples as rows of a batch."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def item(self, index: int) -> Row:
        """The example at `index` as a row; its mask excludes the prompt."""
        example = self._examples[index]
        ids = np.array(example.prompt_ids + example.response_ids, np.int64)
        mask = np.array((False,) * len(example.prompt_ids) + example.response_mask)
        return Row({"input_ids": ids}, mask, group=index, trajectory=index, images=example.images)


def warm_up_config(config: RunConfig) -> RunConfig:
    """The run's config with the optimizer of supervised learning."""
    assert config.sft is not None, "sft is not set"
    train = config.train.model_copy(update={"optimizer": config.sft.optimizer})
    return config.model_copy(update={"train": train})


def sampler_of(
    plan: Plan, supervised: Supervised | None, config: RunConfig, inputs: TextInputs | None
) -> PromptSampler:
    """The sampler of the verb's data: examples for `braid sft`, else prompts or reset states."""
    if plan.verb == "sft" and supervised:
        return supervised.sampler
    if inputs is None:
        return prompt_sampler(config, len(config.simulator.reset_states()["train"]))
    return prompt_sampler(config, max(1, len(inputs.train.prompts)), inputs.train.prompts)
