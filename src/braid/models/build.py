"""Language models built from given sizes, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
)

from braid.models.kinds.language import IMAGE_TOKENS, BuildSpec, TowerSpec

VOCAB_MULTIPLE = 16
"""Vocabulary sizes are rounded up to a multiple of this for faster matrix products. The added tokens are
unused."""


def build_model(
    spec: BuildSpec, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """Build a model with the architecture and sizes of `spec` on the CPU. A seed gives the same weights on
    every machine."""
    config = config_of(spec, **token_ids(tokenizer))
    auto = AutoModelForCausalLM if spec.vision_tower is None else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(config, dtype=dtype, attn_implementation="eager")


def token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Settings of a model's config that follow from its tokenizer."""
    of_images = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    names = zip(of_images, IMAGE_TOKENS, strict=True)
    pad: Any = tokenizer.pad_token_id
    end: Any = tokenizer.eos_token_id
    known = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    return {
        "vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "pad_token_id": pad,
        "bos_token_id": None,
        "eos_token_id": end,
        **{name: known[token] for name, token in names if token in known},
    }


def config_of(spec: BuildSpec, **of_tokens: Any) -> PreTrainedConfig:
    """transformers' config of the model, with the sizes and ids of its tokenizer in `of_tokens`."""
    sizes: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        **_attention_scale(spec),
        **of_tokens,
    }
    if (tower := spec.vision_tower) is None:
        return AutoConfig.for_model(spec.architecture, tie_word_embeddings=spec.tie_embeddings, **sizes)
    columns = 3 * spec.head_dim // 16
    sizes["rope_parameters"] |= {
        "mrope_section": [spec.head_dim // 2 - 2 * columns, columns, columns],
        "mrope_interleaved": True,
    }
    vision = {
        "depth": tower.depth,
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_heads": tower.num_heads,
        "patch_size": tower.patch_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "num_position_embeddings": (tower.image_size // tower.patch_size) ** 2,
        "out_hidden_size": spec.hidden_size,
        "deepstack_visual_indexes": [0],
    }
    ids = {name: sizes.pop(name) for name in list(sizes) if name.startswith(("image_", "video_", "vision_"))}
    return AutoConfig.for_model(
        spec.architecture,
        text_config=sizes,
        vision_config=vision,
        tie_word_embeddings=spec.tie_embeddings,
        **ids,
    )


def processor_of(tower: TowerSpec) -> Any:
    """transformers' image processor for a tower that was built."""
    side = 2 * tower.patch_size
    return Qwen2VLImageProcessorPil(
        patch_size=tower.patch_size,
        merge_size=2,
        temporal_patch_size=1,
        size={"shortest_edge": side * side, "longest_edge": tower.image_size**2},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def _attention_scale(spec: BuildSpec) -> dict[str, int]:
    """Config key for the attention scale of Gemma 2 and 3, which do not derive it from the head dimension."""
    return {"query_pre_attn_scalar": spec.head_dim} if spec.architecture in ("gemma2", "gemma3_text") else {}
