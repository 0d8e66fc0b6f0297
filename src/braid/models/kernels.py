"""Attention kernels over packed rows (`model.attention`).

    auto                PyTorch's variable-length FlashAttention where it applies (CUDA, bf16 or fp16), else sdpa
    sdpa                torch's scaled_dot_product_attention, with its flash or memory-efficient kernels where they apply
    eager               plain matrix products and a softmax; slow, and holds all [queries, keys] scores in memory
    flash_attention_2   the package flash-attn, on CUDA, in bf16 or fp16

All kernels but the variable-length one get segments of similar length as right-padded rectangles
(models.attention.PackedAttention). They agree up to rounding. Sampling uses different kernels.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from braid.errors import ModelError

from .attention import AttentionKernel, LayerCall, PackedAttention, causal_attention, eager_attention
from .batch import PackedBatch

AttentionKind = Literal["auto", "sdpa", "flash_attention_2", "eager"]


def packed_attention(kind: AttentionKind, batch: PackedBatch) -> PackedAttention:
    """Attention context in which each row of the batch attends only to itself."""
    return PackedAttention(batch.lengths, batch.device, batch.shared, _KERNELS[kind])


def check_attention(kind: AttentionKind, device: torch.device) -> None:
    """Raise ModelError if this machine cannot run the kernel."""
    if kind != "flash_attention_2":
        return
    if device.type != "cuda":
        raise ModelError(
            f"model.attention=flash_attention_2 needs CUDA devices, but this run is on {device.type}; "
            "set model.attention=auto"
        )
    if find_spec("flash_attn") is None:
        raise ModelError(
            "model.attention=flash_attention_2 needs the package flash-attn, which is not installed; "
            "install it (pip install flash-attn --no-build-isolation) or set model.attention=auto"
        )


def flash_attention(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """See causal_attention, to which layers in fp32 (without autocast) and layers with sinks fall back:
    flash-attn supports neither."""
    from flash_attn import flash_attn_func  # an optional CUDA extension

    if value.dtype not in (torch.float16, torch.bfloat16) or call.sinks is not None:
        return causal_attention(call, query, key, value)
    return flash_attn_func(
        query,
        key,
        value,
        softmax_scale=call.scaling,
        causal=True,
        window_size=(-1, -1) if call.sliding_window is None else (call.sliding_window - 1, 0),
        softcap=call.softcap or 0.0,
    )


_KERNELS: dict[AttentionKind, AttentionKernel | None] = {
    "auto": None,
    "sdpa": causal_attention,
    "eager": eager_attention,
    "flash_attention_2": flash_attention,
}
