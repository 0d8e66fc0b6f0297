"""Rollout: environments, engines, sampling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .base import Section


class SamplingConfig(Section):
    """How tokens are drawn. Log-probs are those of the distribution drawn from."""

    max_new_tokens: PositiveInt = 256
    """Limit for one turn of the policy."""
    min_new_tokens: NonNegativeInt = 0
    """End tokens are impossible before so many tokens."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in training too."""
    greedy: bool = False
    """Take the likeliest token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens with this probability; 1 for off."""
    top_k: NonNegativeInt = 0
    """Keep the k likeliest tokens; 0 for off."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Drop tokens below this share of the likeliest one's probability; 0 for off."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides positive and multiplies negative logits of tokens seen before; 1 for off."""
    stop_strings: tuple[str, ...] = ()
    """Generation ends after the text contains one of them (the string is kept)."""
    stop_token_ids: tuple[int, ...] = ()
    """Further end tokens beside the tokenizer's."""

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; lower it"
            )
        return self


class SingleTurnEnv(Section):
    """The policy answers once; rewards judge the answer."""

    kind: Literal["single_turn"] = "single_turn"
    """One answer per prompt."""


class ToolEnv(Section):
    """A conversation in which the policy may call tools; replies are context, never trained on."""

    kind: Literal["tools"]
    """Several turns with tools."""
    tools: tuple[Literal["calculator"], ...] = ("calculator",)
    """Tools that can be called."""
    max_turns: PositiveInt = 4
    """Turns of the policy after which the trajectory is truncated."""
    max_context_tokens: PositiveInt = 1024
    """Length of prompt, turns and replies after which the trajectory is truncated."""
    tool_timeout_s: PositiveFloat = 5.0
    """Limit for one call of a tool."""


class GymnasiumEnv(Section):
    """A Gymnasium environment, stepped in vectors."""

    kind: Literal["gymnasium"]
    """A vectorised simulator."""
    id: str
    """Its registered name, for example CartPole-v1."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to gymnasium.make."""
    num_envs: PositiveInt = 8
    """Copies stepped together; more than prompts_per_round * group_size are never all in use."""
    eval_episodes: PositiveInt = 100
    """Episodes of one evaluation, each from a reset state of its own."""


EnvConfig = Annotated[SingleTurnEnv | ToolEnv | GymnasiumEnv, Field(discriminator="kind")]


class NativeEngineConfig(Section):
    """Limits of the native engine."""

    max_running: PositiveInt = 256
    """Sequences decoded together."""
    kv_budget_tokens: PositiveInt = 131_072
    """Tokens of key/value cache in all; a request is admitted when its longest possible length fits."""
    prefill_tokens: PositiveInt = 8192
    """Prompt tokens in one forward pass."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the weights that it computes with: auto shares the trainer's own tensors, the others hold a copy."""
    cuda_graphs: bool = True
    """Capture the decoding step on CUDA devices."""


class FilterConfig(Section):
    """Which groups are worth training on, by the rewards of their valid trajectories."""

    min_std: NonNegativeFloat | None = None
    """Groups whose rewards have a standard deviation of at most this are dropped (0: those with equal rewards)."""
    min_mean: float | None = None
    """Groups whose mean reward is at most this are dropped."""
    max_mean: float | None = None
    """Groups whose mean reward is at least this are dropped."""
    then: Literal["mask", "resample", "replace"] = "mask"
    """mask: train without them. resample: draw new prompts until the round is full (DAPO). replace: train on copies of kept
    groups in their place."""
    max_batches: PositiveInt = 30
    """resample: batches of prompts drawn for one round at most; then the round goes on with what was kept."""
    min_kept_fraction: float = Field(default=0.3, ge=0.0, le=1.0)
    """replace: share of kept groups below which the round is trained without the others instead."""


class RolloutConfig(Section):
    """How a round's trajectories are produced."""

    prompts_per_round: PositiveInt = 32
    """Prompts (or reset states) of one round."""
    group_size: PositiveInt = 8
    """Trajectories per prompt."""
    sampling: SamplingConfig = SamplingConfig()
    """How training trajectories are sampled."""
    engine: Literal["native"] = "native"
    """What samples."""
    native: NativeEngineConfig = NativeEngineConfig()
    """Limits of the native engine."""
    filter: FilterConfig = FilterConfig()
    """Groups left out of training."""
    retries: NonNegativeInt = 1
    """Further tries of a trajectory whose environment or engine failed."""
    max_invalid_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of invalid trajectories in a round above which the run ends with their reasons."""
