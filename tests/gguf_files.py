"""Tiny GGUF files, written from transformers' models as llama.cpp converts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 124)), "Ġ", "an"]
"""Vocabulary of a byte-level tokenizer with one merge: 96 tokens, three of them special."""


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    *,
    quantization: str = "F32",
    architecture: str | None = None,
    settings: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    without: str = "",
    has_tokenizer: bool = True,
) -> Path:
    """Write `model`, its matrices with `quantization`, with further `settings` of the architecture and
    `tensors`, but `without` one of the tensors."""
    config: Any = model.config
    name = architecture or config.model_type
    writer = gguf.GGUFWriter(file, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head_dim)
    for key, value in (settings or {}).items():
        if isinstance(value, str):
            writer.add_string(f"{name}.{key}", value)
        else:
            writer.add_float32(f"{name}.{key}", value)
    if has_tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
        writer.add_token_merges(["a n"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(0)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
    arch = next(arch for arch, value in gguf.MODEL_ARCH_NAMES.items() if value == config.model_type)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in {**model.state_dict(), **(tensors or {})}.items():
        stem, dot, end = key.rpartition(".")
        as_gguf = f"{names.get_name(stem)}{dot}{end}" if names.get_name(stem) else key
        if (config.tie_word_embeddings and key == "lm_head.weight") or as_gguf == without:
            continue
        values = tensor.detach().float()
        if config.model_type == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            values = values.view(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType[quantization if values.ndim == 2 else "F32"]
        data = gguf.quantize(np.ascontiguousarray(values.numpy()), kind)
        writer.add_tensor(as_gguf, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
