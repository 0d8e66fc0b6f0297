"""Supervised learning on worked examples: alone under `braid sft` (imitation.py), or as the warm-up before
reinforcement learning.

A step takes `rows_per_step` examples; with `sft.epochs` the last step of a pass takes those that are left.
The loss is the cross-entropy of the responses, with `sft.distillation` mixed with the divergence from a
teacher, summed over the step and divided by their number of tokens; prompts and environment replies are
context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from braid.algorithms.aggregate import row_weights
from braid.config.prefer import PreferConfig
from braid.config.schema import RunConfig
from braid.config.sft import DistillationConfig, SftConfig
from braid.data.rows import Lazy
from braid.data.sampler import PromptSampler
from braid.data.worked import Example
from braid.plan import Plan
from braid.report.metrics import Metrics
from braid.training.group import ModelGroup
from braid.training.losses import supervised_loss
from braid.types import Row

from .inputs import TextInputs, example_sampler, prompt_sampler
from .reports import record

_AT_ONCE = 256
"""Held-out examples in host memory at a time."""
_MAX_LOSS = 700.0
"""Loss beyond which the perplexity would be infinite."""


@dataclass
class Supervised:
    """Examples, their sampling order, and the model trained on them, which is created on first use."""

    rows: Sequence[Row]
    held_out: Mapping[str, Sequence[Row]]
    """Rows of evaluations by source."""
    sampler: PromptSampler
    new_model: Callable[[], ModelGroup]
    num_steps: int
    rows_per_step: int
    ends_passes: bool
    """Whether the last step of a pass over the rows takes only those that are left."""
    distillation: DistillationConfig | None = None
    teacher: ModelGroup | None = None
    """The model whose distribution is learned, with `distillation`."""

    @cached_property
    def model(self) -> ModelGroup:
        return self.new_model()

    def learn(self) -> Metrics:
        """Take one optimizer step."""
        num_rows = min(self.rows_per_step, self.sampler.num_left) if self.ends_passes else self.rows_per_step
        batch = [self.rows[i] for i in self.sampler.take(num_rows)]
        num_tokens = [row.num_tokens for row in batch]
        weights = row_weights(num_tokens, list(range(len(batch))), mode="token_mean", constant=None)
        if self.distillation is not None and self.distillation.top_k is not None:
            assert self.teacher is not None, "the plan checks that there is one"
            top = self.teacher.infer(batch, frozenset({"top_tokens", "top_logprobs"}))
            for row, result in zip(batch, top, strict=True):
                row.fields |= result
        metrics = Metrics()
        record(metrics, "sft", self.model.train(batch, weights, supervised_loss(self.distillation)))
        metrics.add("sft/tokens", sum(num_tokens))
        metrics.mean("sft/epoch", self.sampler.num_drawn, self.sampler.num_prompts)
        return metrics

    def evaluate(self) -> Metrics:
        """Measure loss and perplexity of held-out examples, of each source and of all together: the mean over
        their tokens, in float64."""
        totals = {name: self._total(rows) for name, rows in self.held_out.items()}
        both = tuple(map(sum, zip(*totals.values(), strict=True)))
        metrics = Metrics()
        for name, (loss, num_tokens) in {**totals, "all": both}.items():
            metrics.mean(f"eval/{name}/loss", loss, num_tokens)
            metrics.mean(f"eval/{name}/perplexity", math.exp(min(loss / num_tokens, _MAX_LOSS)))
        return metrics

    def _total(self, rows: Sequence[Row]) -> tuple[float, int]:
        """The sum of the cross-entropy over the tokens of rows, and the number of these tokens."""
        loss, num_tokens = 0.0, 0
        for start in range(0, len(rows), _AT_ONCE):
            batch = rows[start : start + _AT_ONCE]
            for row, result in zip(batch, self.model.infer(batch, frozenset({"logprobs"})), strict=True):
                loss -= float(result["logprobs"][row.mask].sum(dtype=np.float64))
                num_tokens += row.num_tokens
        return loss, num_tokens


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

        rows, held_out = demonstration_rows(config), {}
        sampler = PromptSampler(len(rows), seed=config.run.seed, shuffle=sft.shuffle)
    else:
        rows, sampler = ExampleRows(inputs.examples.examples), example_sampler(config, inputs.examples)
        by_source = inputs.held_out_examples.by_source
        held_out = {name: ExampleRows(examples) for name, examples in by_source.items()}
    assert plan.sft_steps is not None, "the examples have been read"
    return Supervised(
        rows=rows,
        held_out=held_out,
        sampler=sampler,
        new_model=new_model,
        num_steps=plan.sft_steps,
        rows_per_step=sft.rows_per_step,
        ends_passes=sft.steps is None,
        distillation=sft.distillation,
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


def config_of(config: RunConfig, section: SftConfig | PreferConfig | None) -> RunConfig:
    """The run's config with the optimizer of a section, and for text the log-probs of the model itself rather
    than of a sampling temperature. With sft.distillation the KL is that of the section."""
    assert section is not None, "the plan checks that the section is set"
    train = config.train.model_copy(update={"optimizer": section.optimizer})
    rollout, algorithm = config.rollout, config.algorithm
    if isinstance(section, SftConfig) and (distillation := section.distillation) is not None:
        settings = {"kl_mixture": distillation.mixture, "kl_top_k": distillation.top_k}
        algorithm = algorithm.model_copy(update=settings)
    if not config.env.is_simulator:
        sampling = rollout.sampling.model_copy(update={"temperature": 1.0})
        rollout = rollout.model_copy(update={"sampling": sampling})
    return config.model_copy(update={"train": train, "rollout": rollout, "algorithm": algorithm})


def sampler_of(
    plan: Plan, supervised: Supervised | None, config: RunConfig, inputs: TextInputs | None
) -> PromptSampler:
    """The sampler of the verb's data: examples for `braid sft`, else prompts or reset states."""
    if plan.verb == "sft" and supervised:
        return supervised.sampler
    if inputs is None:
        return prompt_sampler(config, len(config.simulator.reset_states()["train"]))
    return prompt_sampler(config, max(1, len(inputs.train.prompts)), inputs.train.prompts)
