"""Language models: from a folder, or built from sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveInt, model_validator

from braid.sections import Section

from .base import PolicyKind

if TYPE_CHECKING:
    import torch

    from braid.config.schema import RunConfig


class LanguageModel(PolicyKind):
    """A language model. Its settings are those of `model` itself."""

    key: ClassVar[str] = "model.path"
    is_robot: ClassVar[bool] = False
    imitates: ClassVar[Literal["examples", "demonstrations"] | None] = "examples"

    def problems(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        if not config.env.is_simulator:
            return
        built = "path" if config.model.path else "build"
        why = (
            f"a language model cannot act in a simulator; use model.mlp instead of model.{built}, or "
            "set model.vla if it is a vision-language-action policy"
        )
        yield "env.kind", why

    def export(self, config: RunConfig, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        from braid.models.export import export_language_model

        export_language_model(config, weights, folder)


class BuildSpec(Section):
    """A language model with random weights and a character-level tokenizer."""

    architecture: Literal["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral"] = "qwen3"
    """Transformers architecture to build."""
    hidden_size: PositiveInt = 256
    """Hidden size."""
    intermediate_size: PositiveInt = 704
    """Hidden size of the feed-forward layers."""
    num_layers: PositiveInt = 4
    """Number of decoder layers."""
    num_heads: PositiveInt = 4
    """Number of attention heads."""
    num_kv_heads: PositiveInt = 2
    """Number of key/value heads; must divide num_heads."""
    head_dim: PositiveInt = 64
    """Dimension of one attention head; must be even."""
    max_positions: PositiveInt = 2048
    """Maximum sequence length, in tokens."""
    characters: str = " 0123456789+-*/=().,:;?!'\"\nABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz<>_"
    """Alphabet of the character tokenizer; other characters map to the unknown token."""
    words: tuple[str, ...] = ()
    """Strings that are one token each, wherever they occur in a text."""
    special_tokens: tuple[str, ...] = ()
    """Control tokens, such as the markers of a chat template. In messages these strings are ordinary text,
    character by character."""
    tie_embeddings: bool = True
    """Tie the output head to the input embedding."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> BuildSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "set num_kv_heads to a divisor of num_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even number")
        return self
