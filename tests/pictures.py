"""Tiny vision-language models, and images for them."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma4ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    PreTrainedModel,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

from braid.models.tokenizer import character_tokenizer
from braid.models.vision import Vision
from braid.types import Image

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<img>", "</img>")
TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz .?", SPECIAL)
TOKENIZER.start_image_token, TOKENIZER.end_image_token = "<img>", "</img>"
TOKENIZER.boi_token, TOKENIZER.eoi_token = SPECIAL[:2]
PAD = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
_VIDEO = TOKENIZER.convert_tokens_to_ids("<|video_pad|>")
_START, _END = (TOKENIZER.convert_tokens_to_ids(name) for name in SPECIAL[:2])

_TEXT: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TOWER: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 1, "out_hidden_size": 64,
}  # fmt: skip
_OF_IDS = {
    "image_token_id": PAD, "video_token_id": _VIDEO, "vision_start_token_id": _START, "vision_end_token_id": _END,
}  # fmt: skip
_VIT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


def _qwen(kind: str, rope: dict[str, Any], text: dict[str, Any], **tower: Any) -> Any:
    return AutoConfig.for_model(
        kind,
        text_config=_TEXT | {"rope_parameters": _ROPE | rope} | text,
        vision_config=_TOWER | tower,
        **_OF_IDS,
    )


def config_of(family: str) -> Any:
    """A config of the family with tiny sizes."""
    match family:
        case "qwen2_5_vl":
            return _qwen(family, {}, {}, window_size=16, fullatt_block_indexes=[2])
        case "qwen3_vl":
            tower = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
            return _qwen(family, {"mrope_interleaved": True}, {}, **tower)
        case "qwen3_5":
            rope = {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
            linear = {
                "layer_types": ["linear_attention", "full_attention", "full_attention"],
                "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            }  # fmt: skip
            return _qwen(family, rope, linear, num_position_embeddings=64)
        case "glm4v":
            ids = {
                "image_token_id": PAD, "video_token_id": _VIDEO, "image_start_token_id": _START,
                "image_end_token_id": _END, "video_start_token_id": 46, "video_end_token_id": 47,
            }  # fmt: skip
            rope = _ROPE | {"partial_rotary_factor": 1.0}
            return AutoConfig.for_model(
                family,
                text_config=_TEXT | {"rope_parameters": rope},
                vision_config=_TOWER | {"image_size": 32},
                **ids,
            )
        case "internvl":
            tower = _VIT | {"image_size": [16, 16], "patch_size": [4, 4]}
            return AutoConfig.for_model(
                family, text_config=_TEXT | {"model_type": "qwen2"}, vision_config=tower, image_token_id=PAD,
                image_seq_length=4,
            )  # fmt: skip
        case "llava":
            tower = _VIT | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4}
            return AutoConfig.for_model(
                family, text_config=_TEXT | {"model_type": "llama"}, vision_config=tower, image_token_index=PAD,
                image_seq_length=16,
            )  # fmt: skip
        case "gemma3":
            text = _TEXT | {"sliding_window": 8, "query_pre_attn_scalar": 16}
            text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
            return AutoConfig.for_model(
                family, text_config=text, vision_config=_VIT | {"image_size": 16, "patch_size": 4},
                mm_tokens_per_image=4, image_token_id=PAD, boi_token_index=_START, eoi_token_index=_END,
            )  # fmt: skip
        case "gemma4":
            more = {
                "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
                "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 48,
                "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision", "num_global_key_value_heads": 2,
            }  # fmt: skip
            tower = _VIT | {
                "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "patch_size": 4,
                "position_embedding_size": 32, "pooling_kernel_size": 2,
            }  # fmt: skip
            ids = {"image_token_id": PAD, "video_token_id": _VIDEO, "audio_token_id": 46}
            return AutoConfig.for_model(
                family, text_config=_TEXT | more, vision_config=tower, audio_config=None, boi_token_id=_START,
                eoi_token_id=_END, **ids,
            )  # fmt: skip
        case "smolvlm":
            return AutoConfig.for_model(
                family, text_config=_TEXT | {"model_type": "llama"},
                vision_config=_VIT | {"image_size": 16, "patch_size": 4}, image_token_id=PAD, scale_factor=2,
                pad_token_id=0,
            )  # fmt: skip
        case _:
            raise KeyError(family)


FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "internvl", "llava", "gemma3", "gemma4", "smolvlm")


def processor_of(family: str) -> Any:
    if family == "internvl":
        size = {"height": 16, "width": 16}
        return GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=2, min_patches=1)
    if family == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    if family == "gemma4":
        return Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    if family == "smolvlm":
        return SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    if family == "llava":
        return CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=1, size={"shortest_edge": 64, "longest_edge": 1024}
    )


def vision_of(family: str) -> Vision:
    return Vision(config_of(family), processor_of(family), TOKENIZER)


def model_of(family: str, config: Any = None) -> PreTrainedModel:
    """A random model with weights large enough that each matters; `config` is config_of(family) if None."""
    torch.manual_seed(0)
    config = config or config_of(family)
    config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config).eval().float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def picture(seed: int) -> Image:
    """An image of noise, of one of four sizes."""
    height, width = [(16, 16), (16, 24), (24, 16), (8, 32)][seed % 4]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = BytesIO()
    PIL.Image.fromarray(pixels).save(out, "PNG")
    return Image.of(out.getvalue())
