"""Choices of kernels: of attention over packed rows (`model.attention`), and Liger's
(`train.liger_kernels`)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from braid.errors import ModelError

from .attention import AttentionKernel, LayerCall, PackedAttention, causal_attention, eager_attention
from .batch import PackedBatch
from .cpu_kernels import cpu_kernels

AttentionKind = Literal["auto", "sdpa", "flash_attention_2", "compiled", "eager"]

_LIGER_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Disabled: braid computes log-probs from hidden states itself."""


def packed_attention(kind: AttentionKind, batch: PackedBatch) -> PackedAttention:
    """Attention context in which each row of the batch attends only to itself."""
    return PackedAttention(batch.lengths, batch.device, batch.shared, _KERNELS[kind])


def check_attention(kind: AttentionKind, device: torch.device) -> None:
    """Raise ModelError if this machine cannot run the kernel."""
    if kind == "compiled":
        why_not = (
            cpu_kernels().why_not
            if device.type == "cpu"
            else f"this run is on {device.type}, and they are for CPUs"
        )
        if why_not:
            raise ModelError(
                f"model.attention=compiled needs kernels compiled by Numba, but {why_not}; or set "
                "model.attention=auto"
            )
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


def compiled_attention(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by braid's own machine code, on a CPU."""
    return cpu_kernels().attention(call, query, key, value)


_KERNELS: dict[AttentionKind, AttentionKernel | None] = {
    "auto": None,  # PyTorch's variable-length kernel where it applies, else sdpa
    "sdpa": causal_attention,
    "eager": eager_attention,
    "flash_attention_2": flash_attention,
    "compiled": compiled_attention,
}


def check_liger(device: torch.device) -> None:
    """Raise ModelError if Liger's kernels cannot run on this machine."""
    missing = (
        [] if find_spec("liger_kernel") else ["the package liger-kernel (pip install 'braid-rl[liger]')"]
    )
    if device.type != "cuda":
        missing.append(f"a CUDA device instead of {device.type}")
    if missing:
        raise ModelError(
            f"train.liger_kernels=true needs {' and '.join(missing)}; or set train.liger_kernels=false "
            "(same results up to rounding)"
        )


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Replace norms, rotary embeddings and feed-forward layers by Liger's, if Liger supports the
    architecture."""
    from transformers.integrations.liger import apply_liger_kernel  # imports Triton

    apply_liger_kernel(model, _LIGER_LOSSES)
