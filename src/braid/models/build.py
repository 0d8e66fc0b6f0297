"""Language models built from given sizes, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from braid.config.model import BuildSpec

VOCAB_MULTIPLE = 16
"""Vocabulary sizes are rounded up to a multiple of this for faster matrix products. The added tokens are
unused."""


def build_model(
    spec: BuildSpec, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """Build a model with the architecture and sizes of `spec` on the CPU. A seed gives the same weights on
    every machine."""
    config = config_of(
        spec,
        vocab_size=-(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def config_of(spec: BuildSpec, **of_tokens: Any) -> PreTrainedConfig:
    """transformers' config of the model, with the sizes and ids of its tokenizer in `of_tokens`."""
    return AutoConfig.for_model(
        spec.architecture,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tie_embeddings,
        **_attention_scale(spec),
        **of_tokens,
    )


def _attention_scale(spec: BuildSpec) -> dict[str, int]:
    """Config key for the attention scale of Gemma 2 and 3, which do not derive it from the head dimension."""
    return {"query_pre_attn_scalar": spec.head_dim} if spec.architecture in ("gemma2", "gemma3_text") else {}
