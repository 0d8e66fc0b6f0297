"""Kernels that only CUDA has, in float32 by operators that a graph can record, with the checks of the real
ones."""

# ruff: noqa: PT018  # each assertion is one check of the real kernel
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.fake_cuda
_library = torch.library.Library("aten", "IMPL", "CUDA")
_UNLIMITED = 2**60


def install() -> None:
    _library.impl("_flash_attention_forward", _flash_attention)
    _library.impl("_flash_attention_backward", _flash_attention_backward)
    _library.impl("_grouped_mm", _grouped_mm)
    _library.impl("histc", _histc)


def _attention(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, used_k: Tensor | None, *, is_causal: bool, scale: float | None,
    left: int | None, right: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Probabilities of all queries over all keys [H, Tq, Tk], and the logarithms of their sums [H, Tq].
    `cu_q` and `cu_k` are the ends of the sequences, `used_k` the keys in use of each, `left` and `right` the
    window."""
    num = len(cu_q) - 1
    lengths_q, lengths_k = cu_q.diff(), cu_k.diff() if used_k is None else used_k
    sequence_q, sequence_k = (
        torch.searchsorted(ends[1:].long(), torch.arange(len(x), device=q.device), right=True).clamp(
            max=num - 1
        )
        for ends, x in ((cu_q, q), (cu_k, k))
    )
    place_q = torch.arange(len(q), device=q.device) - cu_q[sequence_q]
    place_k = torch.arange(len(k), device=k.device) - cu_k[sequence_k]
    of_key = (place_q + (lengths_k - lengths_q)[sequence_q])[:, None]  # the query's place among the keys
    is_seen = (sequence_q[:, None] == sequence_k) & (place_k < lengths_k[sequence_k])
    is_seen = is_seen & (place_q < lengths_q[sequence_q])[:, None]
    if is_causal:
        is_seen = is_seen & (place_k <= of_key)
    elif right is not None and right >= 0:
        is_seen = is_seen & (place_k <= of_key + right)
    if left is not None and left >= 0:
        is_seen = is_seen & (place_k >= of_key - left)
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1)
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * _scale(q, scale)
    scores = scores.masked_fill(~is_seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _check_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, used_k: Tensor | None, max_q: int, max_k: int
) -> None:
    """The checks of FlashAttention's mha_varlen_fwd."""
    for x in (q, k, v):
        assert x.is_cuda and x.ndim == 3, "Input tensor must be on CUDA device"
        assert x.dtype in (torch.float16, torch.bfloat16) and x.dtype == q.dtype, (
            "FlashAttention only support fp16 and bf16"
        )
        assert x.stride(-1) == 1, "Input tensor must have contiguous last dimension"
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256, "head_size should be a multiple of 8, at most 256"
    assert q.shape[1] % k.shape[1] == 0, "Number of heads in key/value must divide number of heads in query"
    for numbers, length in ((cu_q, len(cu_q)), (cu_k, len(cu_q)), (used_k, len(cu_q) - 1)):
        if numbers is not None:
            assert numbers.is_cuda and numbers.dtype == torch.int32, "cu_seqlens must be int32 on CUDA device"
            assert numbers.is_contiguous() and len(numbers) == length, "cu_seqlens of another shape"
    for cu, x, longest in ((cu_q, q, max_q), (cu_k, k, max_k if used_k is None else _UNLIMITED)):
        ends = _ops.host(cu)
        assert int(ends[-1]) <= len(x), "cu_seqlens beyond the tensor's end"
        assert int(ends.diff().max()) <= longest, "cu_seqlens above max_seqlen"


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, is_causal: bool,
    debug: bool, *, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: Tensor | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_attention(q, k, v, cu_q, cu_k, seqused_k, max_q, max_k)
    probabilities, logsumexp = _attention(
        q, k, cu_q, cu_k, seqused_k, is_causal=is_causal, scale=scale, left=window_size_left, right=window_size_right
    )  # fmt: skip
    values = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(0, 1)
    attended = (probabilities @ values).transpose(0, 1).to(q.dtype).contiguous()
    empty = torch.empty(0, dtype=torch.int64, device=q.device)
    return attended, logsumexp, empty, empty, torch.empty(0, device=q.device)


def _flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Tensor, logsumexp: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, dropout: float, is_causal: bool, random: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert k.shape[1] == q.shape[1], "the fake device has no backward pass for keys shared by heads"
    probabilities, _ = _attention(
        q, k, cu_q, cu_k, None, is_causal=is_causal, scale=scale, left=window_size_left, right=window_size_right
    )  # fmt: skip
    grad, attended, queries, keys, values = (x.float().transpose(0, 1) for x in (grad, attended, q, k, v))
    of_scores = probabilities * (grad @ values.transpose(1, 2) - (grad * attended).sum(-1, keepdim=True))
    of_scores = of_scores * _scale(q, scale)
    gradients = (
        of_scores @ keys,
        of_scores.transpose(1, 2) @ queries,
        probabilities.transpose(1, 2) @ grad,
    )
    return tuple(x.transpose(0, 1).to(q.dtype).contiguous() for x in gradients)


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Products by group. In bf16 all is on the device (sm90); for other types the real one reads `offs` on
    the host."""
    assert bias is None and out_dtype in (None, a.dtype) and a.dtype == b.dtype
    if a.dtype != torch.bfloat16:
        _ops.wait(f"_grouped_mm of {a.dtype}: offs.cpu()")
    else:
        for x in (a, b):
            assert x.data_ptr() % 16 == 0 and min(x.stride()) == 1, "strides should be multiple of 16 bytes"
            assert all(s * x.itemsize % 16 == 0 for s in x.stride() if s != 1), (
                "strides should be multiple of 16 bytes"
            )
    if a.ndim == 3:
        assert b.ndim == 3
        return (a.float() @ b.float()).to(a.dtype)
    assert offs is not None
    if b.ndim == 3:
        rows = torch.arange(len(a), device=a.device)
        group = torch.searchsorted(offs.long(), rows, right=True).clamp(max=len(offs) - 1)
        by_group = a.float() @ b.float()  # [groups, rows, columns]
        return by_group.gather(0, group[None, :, None].expand(1, -1, b.shape[2]))[0].to(a.dtype)
    starts = torch.cat((torch.zeros(1, dtype=torch.long, device=a.device), offs[:-1].long()))
    at = torch.arange(a.shape[1], device=a.device)
    is_inside = (at >= starts[:, None]) & (at < offs[:, None])
    return (a.float() * is_inside[:, None] @ b.float()).to(a.dtype)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Also of integers, as on CUDA; waits if it has to find the ends."""
    if min == max:
        _ops.wait("histc without ends")
    counts = torch.empty(bins, dtype=x.dtype, device=x.device)
    _ops.host(counts).copy_(torch.histc(_ops.host(x).float(), bins, min, max))
    return counts
