"""Supervised fine-tuning (`braid sft`, and the warm-up before other training): examples with the response to
imitate, or demonstrations of robots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from braid.sections import Section, Unused
from braid.types import Divergence, KlRest, TiledDivergence

from .data import MixShare, Source
from .train import OptimizerConfig

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig


class DistillationConfig(Section):
    """Distillation on the examples: the teacher's distribution is learned besides their tokens."""

    weight: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Weight of the divergence from the teacher in the loss of a token; the rest is that of its
    cross-entropy."""
    divergence: Divergence = "forward_kl"
    """Divergence of the student's distribution p from the teacher's q: kl is KL(p | q), forward_kl KL(q | p);
    jensen_shannon, skewed_kl, skewed_forward_kl, adaptive_kl and mixed_kl depend on `mixture`
    (braid.algorithms.distillation.divergence). Those of a mixture other than jensen_shannon need top_k."""
    mixture: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """The w of the divergences that have one."""
    top_k: PositiveInt | None = None
    """Compare distributions over the teacher's k likeliest tokens only: it may then run in other processes
    than the student. null: over the whole vocabulary."""
    rest: KlRest = "renormalize"
    """What becomes of the tokens beyond top_k, as for algorithm.kl_rest."""

    unused_while = (
        ("top_k", None, "rest"),
        ("divergence", "kl", "mixture"),
        ("divergence", "forward_kl", "mixture"),
    )

    @model_validator(mode="after")
    def _fits_the_vocabulary(self) -> DistillationConfig:
        if self.top_k is None and self.divergence not in get_args(TiledDivergence):
            tiled = ", ".join(get_args(TiledDivergence))
            raise ValueError(
                f"divergence={self.divergence} is computed over the likeliest tokens only; set top_k, or "
                f"divergence to one of {tiled}"
            )
        return self


class SftConfig(Section):
    """Supervised fine-tuning: `braid sft`, or a warm-up before reinforcement learning."""

    data: tuple[Source, ...] = ()
    """Sources of examples: response_key, response_function or messages_key gives what is imitated."""
    eval_data: tuple[Source, ...] = ()
    """Sources of held-out examples, of which evaluations of `braid sft` measure loss and perplexity."""
    mix: tuple[MixShare, ...] = ()
    """Shares of the sources of `data`, kept in every stretch of the examples regardless of their sizes; each
    source may appear once. A source that is exhausted starts over, and an epoch is as many examples as the
    sources with a share have together."""
    train_on: Literal["all_turns", "last_turn"] = "all_turns"
    """Turns of a conversation that are imitated, among those whose weight is not 0."""
    demonstrations: str | None = None
    """Robots: LeRobot folder (versions 2 and 3, with images or videos) of the episodes to imitate."""
    distillation: DistillationConfig | None = None
    """`braid sft`: learn from the distribution of a teacher, the model in reference.path; null for the
    cross-entropy alone."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    """Optimizer and learning rate schedule, separate from those of reinforcement learning."""
    epochs: PositiveFloat = 1.0
    """Passes over the examples. The last step of each takes the examples that are left, so that each is
    trained once per pass."""
    steps: PositiveInt | None = None
    """Number of optimizer steps, in place of `epochs`. All of them are full: a step that reaches the end of
    the examples begins the next pass."""
    rows_per_step: PositiveInt = 64
    """Examples per optimizer step."""
    max_tokens: PositiveInt | None = None
    """Longest prompt with response, in tokens. null: the model's positions."""
    overlong: Literal["drop", "truncate_right"] = "drop"
    """What to do with longer examples, which are counted. drop: leave them out; an error with
    data.overlong=error. truncate_right: cut their end, and leave out those of whose responses nothing
    remains, or whose images would be cut."""
    shuffle: bool = True
    """Shuffle the examples anew in each pass, by the run's seed, instead of keeping the order of the
    sources."""

    only_for_training: ClassVar[str] = "sft.*"

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        lists = "sft.{data,eval_data}[]"
        if plan.verb != "sft":
            yield "only braid sft evaluates held-out examples", "sft.eval_data"
        if self.steps is not None:
            yield "sft.steps sets the length", "sft.epochs"
        if self.demonstrations is not None:
            yield "demonstrations are no text", "sft.{eval_data,mix,train_on,max_tokens,overlong}"
        if not any(source.messages_key or source.response_function for source in self.data):
            yield "every example is a prompt with one response", "sft.train_on"
        yield "supervised examples are not scored", f"{lists}.{{answer_key,source_key}}"
        yield "the policy has no value head", "sft.optimizer.value_lr"
        if not any(source.messages_key for source in (*self.data, *self.eval_data)):
            yield "there are no conversations to imitate (messages_key)", f"{lists}.tools_key"
