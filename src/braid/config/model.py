"""Models: a Hugging Face folder, or a small one built from sizes; critics and references beside the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from .base import Section
from .train import TrainConfig

DType = Literal["fp32", "bf16", "fp16"]


class BuildSpec(Section):
    """A language model made from scratch with random weights; its tokenizer knows single characters."""

    architecture: Literal["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral"] = "qwen3"
    """Transformers architecture that the sizes below are given to."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    intermediate_size: PositiveInt = 704
    """Width of the feed-forward layers."""
    num_layers: PositiveInt = 4
    """Decoder layers."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    num_kv_heads: PositiveInt = 2
    """Key/value heads; divides num_heads."""
    head_dim: PositiveInt = 64
    """Width of one head."""
    max_positions: PositiveInt = 2048
    """Longest sequence the model accepts, in tokens."""
    characters: str = " 0123456789+-*/=().,:;?!'\"\nABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz<>_"
    """Alphabet of the character tokenizer; other characters become the unknown token."""
    tie_embeddings: bool = True
    """Share the input embedding with the output head."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> BuildSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "set num_kv_heads to a divisor of num_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs, so make it even")
        return self


class MlpSpec(Section):
    """A multilayer perceptron over flat observations, for simulators."""

    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Nonlinearity between them."""


class ModelConfig(Section):
    """The policy. Give one of `path`, `build` (language models) or `mlp` (simulators)."""

    path: str | None = None
    """A Hugging Face model folder or hub name."""
    build: BuildSpec | None = None
    """Sizes of a language model made from scratch."""
    mlp: MlpSpec | None = None
    """Sizes of a perceptron policy for a simulator."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name; the model's own when absent."""
    chat_template: str | None = None
    """Jinja text, or path to a .jinja file, in place of the tokenizer's own template."""
    dtype: DType = "fp32"
    """Type in which the trained weights are held."""
    trust_remote_code: bool = False
    """Allow a model folder to bring its own Python code."""

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        given = [k for k in ("path", "build", "mlp") if getattr(self, k) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "none of them"
            raise ValueError(f"give exactly one of path, build and mlp, not {what}")
        return self


class CriticConfig(Section):
    """The value model, used when the algorithm's advantage needs values (gae)."""

    path: str | None = None
    """Folder of its backbone; a copy of the policy's initial weights when absent."""
    train: TrainConfig | None = None
    """Its own optimizer and batch settings; those of the policy when absent."""
    warmup_rounds: int = Field(default=0, ge=0)
    """Rounds at the start in which only the critic learns."""


class ReferenceConfig(Section):
    """The frozen model of the KL terms, used when a KL coefficient is not 0."""

    path: str | None = None
    """Its folder; a copy of the policy as it is when reinforcement starts, when absent."""
