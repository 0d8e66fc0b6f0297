"""Learning from preferences (`braid prefer`): pairs of a preferred and a rejected response."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from braid.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceLoss
from braid.algorithms.preference_losses.sigmoid import Sigmoid
from braid.sections import Section, Unused

from .data import Source
from .kinds import KindOf
from .train import OptimizerConfig

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig

    LossKind = PreferenceLoss
else:
    LossKind = KindOf(PreferenceLoss, PREFERENCE_LOSSES, "sigmoid").field()


class PreferConfig(Section):
    """Learning from preferences with `braid prefer`: the policy, or a reward model, is trained on pairs of a
    preferred and a rejected response."""

    data: tuple[Source, ...] = ()
    """Sources of pairs to train on: prompt_key, chosen_key and rejected_key, or pair_function. Without a
    column of prompts the common beginning of both responses is the prompt."""
    eval_data: tuple[Source, ...] = ()
    """Sources of held-out pairs, of which evaluations measure loss, accuracy and margin."""
    loss: LossKind = Sigmoid()
    """Loss of pairs: a kind, its settings, or both; or a class or function of your own."""
    sft_coef: NonNegativeFloat = 0.0
    """Coefficient of the mean cross-entropy of the tokens of preferred responses, added to the loss (RPO,
    arXiv 2404.19733)."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    """Optimizer and learning rate schedule, separate from those of reinforcement learning."""
    epochs: PositiveFloat = 1.0
    """Passes over the pairs, rounded up to whole steps."""
    steps: PositiveInt | None = None
    """Number of optimizer steps, in place of `epochs`."""
    pairs_per_step: PositiveInt = 64
    """Pairs per optimizer step."""
    max_tokens: PositiveInt | None = None
    """Longest prompt with response, in tokens; pairs with a longer one are dropped, or an error with
    data.overlong=error. null: the model's positions."""
    precompute_reference: bool = False
    """Compute the reference's log-probs of all pairs once, before the first step. They are kept as two
    numbers of each pair, also in checkpoints."""

    only_for_training: ClassVar[str] = "prefer.*"

    @model_validator(mode="after")
    def _check(self) -> PreferConfig:
        if self.sft_coef and self.loss.trains_reward_model:
            raise ValueError("sft_coef is for policies; a reward model has no log-probs. Remove it")
        return self

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if plan.verb != "prefer":
            yield "only braid prefer learns from pairs", "prefer.*"
        if self.steps is not None:
            yield "prefer.steps sets the length", "prefer.epochs"
        if not self.loss.needs_reference:
            yield "the loss has no reference", "prefer.precompute_reference"
        lists = "prefer.{data,eval_data}[]"
        yield (
            "pairs are not scored, and have their own columns of responses",
            f"{lists}.{{answer_key,source_key,response_key,response_function,messages_key,tools_key}}",
        )
        if not self.loss.trains_reward_model:
            yield "only a reward model reads it", f"{lists}.{{margin_key,target_key}}"
        yield "the policy has no value head", "prefer.optimizer.value_lr"
