"""The `rollout` section: engines and sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from braid.rollout.engines import ENGINES, Engine
from braid.rollout.engines.base import ServedEngine
from braid.rollout.engines.native.kind import Native
from braid.sections import Section, Unused

from .kinds import KindOf

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig

    EngineKind = Engine
else:
    EngineKind = KindOf(Engine, ENGINES, "native").field()

__all__ = ["RolloutConfig", "SamplingConfig", "ServedEngine"]


class SamplingConfig(Section):
    """Sampling of tokens. Recorded log-probs are those of the distribution sampled from."""

    unused_while = (("greedy", True, "top_p top_k min_p"),)

    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens per turn of the policy."""
    min_new_tokens: NonNegativeInt = 0
    """Minimum number of tokens before an end token may be sampled. Log-probs in training ignore it."""
    temperature: PositiveFloat = 1.0
    """Temperature that divides the logits, in training too."""
    greedy: bool = False
    """Greedy decoding."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: keep the smallest set of tokens with this total probability; 1 disables it."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0 disables it."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Drop tokens whose probability is below this fraction of the most likely token's; 0 disables it."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides positive and multiplies negative logits of tokens that already occurred; 1 disables it."""
    stop_strings: tuple[str, ...] = ()
    """Stop when the text, including special tokens, contains one of these (the string is kept)."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens in addition to the model's (model.eos_token_id)."""

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}; lower "
                "it"
            )
        return self


class WeightSyncConfig(Section):
    """Weight sync to engines in other processes."""

    transport: Literal["auto", "shared_memory", "nccl", "gloo", "files"] = "auto"
    """Transport of the weights. auto: the cheapest that the placement allows."""
    bucket_bytes: PositiveInt = 128 * 2**20
    """Bytes sent per transfer."""
    existing_group: Literal["auto", "replace", "refuse"] = "auto"
    """What to do if a server already has a weight sync group: replace it, or stop. auto: replace for external
    servers, refuse for engines that this run started."""


class FilterConfig(Section):
    """Filter of the groups to train on, by the training rewards of their valid trajectories. A dropped group
    counts in no statistic, loss or denominator."""

    unused_while = (
        ("then", "mask", "max_batches min_kept_fraction"),
        ("then", "resample", "min_kept_fraction"),
        ("then", "replace", "max_batches"),
    )

    min_std: NonNegativeFloat | None = None
    """Drop groups whose rewards have at most this standard deviation (0: equal rewards); null: no limit."""
    min_mean: float | None = None
    """Drop groups whose mean reward is at most this; null for no limit."""
    max_mean: float | None = None
    """Drop groups whose mean reward is at least this; null for no limit."""
    then: Literal["mask", "resample", "replace"] = "mask"
    """mask: train without the dropped groups. resample: sample further batches of prompts_per_round prompts
    until the round is full (DAPO); surplus groups are dropped. replace: train on copies of kept groups in
    their place."""
    max_batches: PositiveInt = 30
    """resample: maximum number of prompt batches per round; then the round continues with the groups kept so
    far."""
    min_kept_fraction: float = Field(default=0.3, ge=0.0, le=1.0)
    """replace: fraction of kept groups below which dropped groups are masked instead."""


class RolloutConfig(Section):
    """Rollout settings: how a round's trajectories are sampled, by which engine, and which are kept."""

    unused_while = (
        ("check_weights", False, "check_weights_dir"),
        ("group_size", 1, "filter.min_std"),
    )

    prompts_per_round: PositiveInt = 32
    """Prompts (or reset states) per round."""
    group_size: PositiveInt = 8
    """Trajectories per prompt."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training trajectories."""
    max_sequence_tokens: PositiveInt | None = None
    """Maximum tokens of prompt and response (including replies), in training and evaluation; a long prompt
    leaves less for the response. null: the sum of their limits."""
    engine: EngineKind = Native()
    """Inference engine: a kind, its settings, or both; or the path of your own. Settings without a kind are
    those of native, the default."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Weight sync to engines in other processes."""
    request_batch: PositiveInt | None = None
    """Maximum number of prompts sampled at a time; null for the whole round."""
    print_outputs: bool = False
    """Log every response as text."""
    check_weights: bool = False
    """Compare a fingerprint of the engine's weights with the trainer's after each weight sync."""
    check_weights_dir: str | None = None
    """Folder that stores both weights if they differ; `check_weights/` in the run's folder when null."""
    filter: FilterConfig = FilterConfig()
    """Filter of the groups to train on."""
    env_timeout_s: PositiveFloat = 300.0
    """Timeout of one call of a simulator, in seconds: of all environments of a process (env.processes), or of
    its start. The episodes of a late one have failed."""
    retries: NonNegativeInt = 1
    """Retries of a trajectory whose environment or engine failed."""
    max_invalid_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    """Fraction of invalid trajectories in a round, or of a source in an evaluation, above which the run fails
    with their reasons."""

    only_for_training: ClassVar[str] = "rollout.{prompts_per_round,group_size,filter.*}"

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if (self.request_batch or 0) >= self.prompts_per_round:
            yield "a round does not have more prompts than that", "rollout.request_batch"
        new = max(sampling.max_new_tokens for sampling in (self.sampling, config.eval_sampling))
        longest = config.env.context_limit or config.data.max_prompt_tokens + new
        if self.max_sequence_tokens is not None and self.max_sequence_tokens >= longest:
            why = "the limits of prompt and answer do not add up to more than that"
            yield why, "rollout.max_sequence_tokens"

    @field_validator("engine")
    @classmethod
    def _has_a_place(cls, engine: Engine) -> Engine:
        if not isinstance(engine, Native | ServedEngine):
            raise ValueError(
                f"{engine.kind!r} derives from Engine alone; an engine in the run's processes derives from "
                "braid.rollout.engines.native.kind.Native, others from "
                "braid.rollout.engines.base.ServedEngine"
            )
        return engine
