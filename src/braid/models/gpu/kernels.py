# Triton's own types, where it is installed (CUDA builds of torch bring it), do not know what @jit makes.
# pyright: reportIndexIssue=false, reportInvalidTypeForm=false, reportMissingImports=false
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Triton kernels: norms, rotary embeddings, gates, and attention of one new token per sequence over the
cache.

transformers computes each of these as a chain of elementwise operations. In a decode step of a few hundred
rows every link of the chain costs more to launch than to compute: 60 launches a layer, of which these kernels
leave 13. In an update every link reads and writes whole activations. All compute in float32, and round where
the model's own layers do.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_POSITIONS = 64
"""Cached positions that attention reads at a time."""
_MIN_HEADS = 16
"""Least number of rows of a matrix product."""
_MOST_PARTS = 16
_PROGRAMS = 264
"""Programs that keep a GPU busy: two for each multiprocessor of an H100 or H200."""


@triton.jit
def _add_and_norm(
    x, delta, weight, out, size, eps, offset, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + row * size + at, mask=inside, other=0.0).to(tl.float32)
        stored = values.to(x.dtype.element_ty)
        tl.store(x + row * size + at, stored, mask=inside)
        values = stored.to(tl.float32)
    rate = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row * size + at, (values * rate * scale).to(out.dtype.element_ty), mask=inside)


def add_and_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, *, eps: float, offset: float = 0.0, dtype: torch.dtype
) -> Tensor:
    """x [N, D] += delta [N, D], if any; returns x / sqrt(mean(x^2) + eps) * (weight [D] + offset) as `dtype`
    (RMSNorm, arXiv 1910.07467)."""
    out = torch.empty_like(x, dtype=dtype)
    block = triton.next_power_of_2(x.shape[1])
    _add_and_norm[(len(x),)](
        x, x if delta is None else delta, weight, out, x.shape[1], eps, offset,
        HAS_DELTA=delta is not None, BLOCK=block, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip
    return out


_TILE = 4096
"""Elements of a norm's rows that one program holds."""


@triton.jit
def _norm(x, weight, out, rates, num, size, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < num)[:, None] & (at < size)[None, :]
    place = row[:, None] * size + at[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    rate = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / size + eps)
    tl.store(rates + row, rate, mask=row < num)
    scale = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + place, (values * rate[:, None] * scale[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    grad, x, weight, rates, grad_x, grad_weight, num, size, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    scale = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in range(tiles):
        row = (tl.program_id(0).to(tl.int64) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < num)[:, None] & (at < size)[None, :]
        place = row[:, None] * size + at[None, :]
        d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        rate = tl.load(rates + row, mask=row < num, other=0.0)
        normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * rate[:, None]
        total += tl.sum(d * normed, axis=0)
        d *= scale[None, :]
        along = tl.sum(d * normed, axis=1) / size
        d = (d - normed * along[:, None]) * rate[:, None]
        tl.store(grad_x + place, d.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + tl.program_id(0).to(tl.int64) * size + at, total, mask=at < size)


class RMSNorm(torch.autograd.Function):
    """x [..., D] / sqrt(mean(x^2) + eps) * weight [D] as `dtype` (arXiv 1910.07467), differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x, size = x.contiguous(), x.shape[-1]
        num, block = x.numel() // size, triton.next_power_of_2(size)
        out, rates = torch.empty_like(x, dtype=dtype), x.new_empty(num, dtype=torch.float32)
        rows = max(1, _TILE // block)
        _norm[(triton.cdiv(num, rows),)](
            x, weight, out, rates, num, size, eps, ROWS=rows, BLOCK=block, num_warps=8
        )
        ctx.save_for_backward(x, weight, rates)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """With r = 1 / rms(x), n = r x: dx = r (g w - n / D sum(g w n)), dw = sum over positions of g n: of
        the rows of a program first, so that the result does not depend on their order in time."""
        x, weight, rates = ctx.saved_tensors
        size = x.shape[-1]
        block = triton.next_power_of_2(size)
        rows = max(1, _TILE // block)
        tiles = triton.cdiv(triton.cdiv(len(rates), rows), 2 * _PROGRAMS)
        programs = triton.cdiv(len(rates), rows * tiles)
        grad_x = torch.empty_like(x)
        grad_weight = weight.new_empty(programs, size, dtype=torch.float32)
        _norm_backward[(programs,)](
            grad.contiguous(), x, weight, rates, grad_x, grad_weight, len(rates), size, tiles,
            ROWS=rows, BLOCK=block, num_warps=8,
        )  # fmt: skip
        return grad_x, grad_weight.sum(0).to(weight.dtype), None, None


@triton.jit
def _rotate(
    x, cosines, sines, out, num, x_batch, x_head, x_token, out_batch, out_head, out_token, turn_batch,
    turn_token, HEADS: tl.constexpr, SIZE: tl.constexpr, HEADS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    IS_BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch = token // num
    token = token % num
    head, at = tl.arange(0, HEADS_BLOCK), tl.arange(0, BLOCK)
    in_half = at < SIZE // 2
    inside = (head < HEADS)[:, None] & in_half[None, :]
    source = x + batch * x_batch + token * x_token + head[:, None] * x_head + at[None, :]
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + SIZE // 2, mask=inside, other=0.0).to(tl.float32)
    turn = batch * turn_batch + token * turn_token + at
    cos_a = tl.load(cosines + turn, mask=in_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cosines + turn + SIZE // 2, mask=in_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sines + turn, mask=in_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sines + turn + SIZE // 2, mask=in_half, other=0.0).to(tl.float32)
    if IS_BACK:
        first = a * cos_a[None, :] + b * sin_b[None, :]
        second = b * cos_b[None, :] - a * sin_a[None, :]
    else:
        first = a * cos_a[None, :] - b * sin_a[None, :]
        second = b * cos_b[None, :] + a * sin_b[None, :]
    target = out + batch * out_batch + token * out_token + head[:, None] * out_head + at[None, :]
    tl.store(target, first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + SIZE // 2, second.to(out.dtype.element_ty), mask=inside)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, is_back: bool) -> Tensor:
    batch, heads, num, size = x.shape
    assert x.stride(3) == cos.stride(2) == sin.stride(2) == 1, "numbers of a row are adjacent"
    out = x.new_empty(batch, num, heads, size, dtype=dtype).transpose(1, 2)
    _rotate[(batch * num,)](
        x, cos, sin, out, num, *x.stride()[:3], *out.stride()[:3], cos.stride(0) if len(cos) > 1 else 0,
        cos.stride(1), HEADS=heads, SIZE=size, HEADS_BLOCK=triton.next_power_of_2(heads),
        BLOCK=triton.next_power_of_2(size // 2), IS_BACK=is_back, num_warps=4,
    )  # fmt: skip
    return out


class Rotary(torch.autograd.Function):
    """Rotary embedding (arXiv 2104.09864) of x [B, H, T, d] as `dtype`, differentiable once in x. `cos` and
    `sin` [B or 1, T, d]; dimensions i and i + d / 2 turn together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        x = x if x.stride(3) == 1 else x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turned(x, cos, sin, dtype, is_back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        return _turned(grad, cos, sin, ctx.dtype, is_back=True), None, None, None


@triton.jit
def _gate(gate, up, out, size, stride, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(grad, gate, up, grad_gate, grad_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_up + at, (d * g * s).to(grad_up.dtype.element_ty), mask=inside)
    tl.store(grad_gate + at, (d * u * s * (1.0 + g * (1.0 - s))).to(grad_gate.dtype.element_ty), mask=inside)


_BLOCK = 1024


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise [N, I] (SwiGLU, arXiv 2002.05202). Rows may be apart, in both alike."""
    num, size = gate.shape
    assert gate.stride() == up.stride() == (gate.stride(0), 1), "halves of one tensor, or two alike"
    out = gate.new_empty(num, size)
    _gate[(num, triton.cdiv(size, _BLOCK))](gate, up, out, size, gate.stride(0), BLOCK=_BLOCK)
    return out


class SwiGLU(torch.autograd.Function):
    """`gate`, differentiable once: one kernel each way, and no intermediate is kept."""

    @staticmethod
    def forward(ctx: Any, gate_: Tensor, up: Tensor) -> Tensor:
        gate_, up = gate_.contiguous(), up.contiguous()
        ctx.save_for_backward(gate_, up)
        return gate(gate_.flatten(0, -2), up.flatten(0, -2)).view_as(gate_)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate_, up = ctx.saved_tensors
        grad_gate, grad_up, num = torch.empty_like(gate_), torch.empty_like(up), gate_.numel()
        _gate_backward[(triton.cdiv(num, _BLOCK),)](
            grad.contiguous(), gate_, up, grad_gate, grad_up, num, BLOCK=_BLOCK
        )
        return grad_gate, grad_up


@triton.jit
def _prepare(
    q, k, v, q_stride, kv_stride, q_weight, k_weight, rotary, positions, out, keys, values, row, length, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    inside = at < SIZE // 2
    is_query = head < Q_HEADS
    position = tl.load(positions + token)
    if head < Q_HEADS + KV_HEADS:
        source = k + token * kv_stride + (head - Q_HEADS) * SIZE
        weight = k_weight
        if is_query:
            source = q + token * q_stride + head * SIZE
            weight = q_weight
        a = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + SIZE // 2 + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            rate = 1.0 / tl.sqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / SIZE + eps)
            a *= rate * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            b *= rate * tl.load(weight + SIZE // 2 + at, mask=inside, other=0.0).to(tl.float32)
            a, b = a.to(out.dtype.element_ty).to(tl.float32), b.to(out.dtype.element_ty).to(tl.float32)
        turn = rotary + token * 2 * SIZE
        cos_a, cos_b = tl.load(turn + at, mask=inside), tl.load(turn + SIZE // 2 + at, mask=inside)
        sin_a = tl.load(turn + SIZE + at, mask=inside)
        sin_b = tl.load(turn + SIZE + SIZE // 2 + at, mask=inside)
        kind = rotary.dtype.element_ty  # products are rounded to it, as by the model's own layers
        first = (a * cos_a).to(kind).to(tl.float32) - (b * sin_a).to(kind).to(tl.float32)
        second = (b * cos_b).to(kind).to(tl.float32) + (a * sin_b).to(kind).to(tl.float32)
        target = keys + (((row + token) * KV_HEADS + head - Q_HEADS) * length + position) * SIZE
        if is_query:
            target = out + (token * Q_HEADS + head) * SIZE
        tl.store(target + at, first.to(out.dtype.element_ty), mask=inside)
        tl.store(target + SIZE // 2 + at, second.to(out.dtype.element_ty), mask=inside)
    else:
        kv_head = head - Q_HEADS - KV_HEADS
        source = v + token * kv_stride + kv_head * SIZE
        target = values + (((row + token) * KV_HEADS + kv_head) * length + position) * SIZE
        for start in tl.static_range(2):
            part = tl.load(source + start * (SIZE // 2) + at, mask=inside)
            tl.store(target + start * (SIZE // 2) + at, part, mask=inside)


def prepare(
    query: Tensor, key: Tensor, value: Tensor, *, norms: tuple[Tensor, Tensor, float] | None, rotary: Tensor,
    positions: Tensor, keys: Tensor, values: Tensor, row: int,
) -> Tensor:  # fmt: skip
    """Queries [n, Hq, d] with their norm and rotary embedding, of `query` [n, Hq * d]. Keys and values [n,
    Hkv * d] are written to the cache, [rows, Hkv, L, d], in the rows `row` + i at `positions` [n]. Rows of
    all three may be apart.

    `norms`: weights [d] for queries and keys and their epsilon; `rotary` [n, 2 d]: cosines and sines, whose
    dimensions i and i + d / 2 turn together."""
    kv_heads, length, size = keys.shape[1:]
    num, q_heads = len(query), query.shape[1] // size
    assert query.dtype == key.dtype == value.dtype == keys.dtype, "autocast converts all alike"
    assert key.stride() == value.stride(), "parts of one tensor, or each whole"
    assert query.stride(1) == key.stride(1) == 1, "numbers of a row are adjacent"
    assert all(x.is_contiguous() for x in (rotary, keys, values)), "without gaps"
    out = query.new_empty(query.shape)
    q_weight, k_weight, eps = norms or (query, key, 0.0)
    _prepare[(num, q_heads + 2 * kv_heads)](
        query, key, value, query.stride(0), key.stride(0), q_weight, k_weight, rotary, positions, out, keys,
        values, row, length, eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, SIZE=size, HALF=triton.next_power_of_2(size // 2),
        HAS_NORM=norms is not None, num_warps=1,
    )  # fmt: skip
    return out.view(num, q_heads, size)


@triton.jit
def _attend(
    query, keys, values, positions, sinks, out, largest, totals, row, length, scale, softcap, window,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, DIMS: tl.constexpr,
    PARTS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    token, head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    part = tl.program_id(1)
    g, d, n = tl.arange(0, GROUPS), tl.arange(0, DIMS), tl.arange(0, POSITIONS)
    of_head = g < HEADS // KV_HEADS
    in_head = d < SIZE
    end = (tl.load(positions + token) + 1).to(tl.int32)
    start = tl.maximum(end - window, 0)
    share = tl.cdiv(tl.cdiv(end - start, PARTS), POSITIONS) * POSITIONS
    start += part * share
    end = tl.minimum(start + share, end)
    place = token * HEADS + head * (HEADS // KV_HEADS) + g
    q = tl.load(
        query + place[:, None] * SIZE + d[None, :], mask=of_head[:, None] & in_head[None, :], other=0.0
    )
    base = ((row + token) * KV_HEADS + head) * length * SIZE
    top = tl.full([GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    if HAS_SINKS:
        if part == 0:
            top = tl.load(sinks + head * (HEADS // KV_HEADS) + g, mask=of_head, other=0.0).to(tl.float32)
            total += 1.0
    mixed = tl.zeros([GROUPS, DIMS], tl.float32)
    for first in range(start, end, POSITIONS):
        is_seen = first + n < end
        at = base + (first + n).to(tl.int64)[:, None] * SIZE + d[None, :]
        inside = is_seen[:, None] & in_head[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0)
        v = tl.load(values + at, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        decay = tl.exp(top - higher)
        total = total * decay + tl.sum(weights, axis=1)
        mixed = mixed * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    if PARTS == 1:
        mixed = mixed / total[:, None]
        target = place
    else:
        target = place * PARTS + part
        tl.store(largest + target, top, mask=of_head)
        tl.store(totals + target, total, mask=of_head)
    tl.store(
        out + target[:, None] * SIZE + d[None, :], mixed.to(out.dtype.element_ty),
        mask=of_head[:, None] & in_head[None, :],
    )  # fmt: skip


@triton.jit
def _join(mixed, largest, totals, out, SIZE: tl.constexpr, DIMS: tl.constexpr, PARTS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    part, d = tl.arange(0, PARTS), tl.arange(0, DIMS)
    top = tl.load(largest + place * PARTS + part)
    weight = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(weight * tl.load(totals + place * PARTS + part), axis=0)
    at = (place * PARTS + part)[:, None] * SIZE + d[None, :]
    values = tl.load(mixed + at, mask=(d < SIZE)[None, :], other=0.0)
    values = tl.sum(values * weight[:, None], axis=0) / total
    tl.store(out + place * SIZE + d, values.to(out.dtype.element_ty), mask=d < SIZE)


def attend_cache(
    query: Tensor, keys: Tensor, values: Tensor, *, positions: Tensor, row: int, longest: int, scaling: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one new token [n, Hq, d] of each sequence to what is cached up to its position: [n, Hq,
    d].

    `keys` and `values` [rows, Hkv, L, d], of which sequence i has the row `row` + i and reads the first
    `positions` [n] + 1, or the last `window` of these. `longest` bounds them, and only decides into how many
    parts a sequence is divided. `sinks` [Hq] as in models.attention.LayerCall."""
    num, heads, size = query.shape
    kv_heads, length = keys.shape[1:3]
    query = query.contiguous()
    parts = 1
    while parts < _MOST_PARTS and num * kv_heads * parts < _PROGRAMS and longest > 2 * parts * _POSITIONS:
        parts *= 2
    out = torch.empty_like(query)
    mixed, largest, totals = out, out, out
    if parts > 1:
        mixed = query.new_empty(num, heads, parts, size, dtype=torch.float32)
        largest, totals = (query.new_empty(num, heads, parts, dtype=torch.float32) for _ in range(2))
    dims = triton.next_power_of_2(size)
    _attend[(num * kv_heads, parts)](
        query, keys, values, positions, query if sinks is None else sinks, mixed, largest, totals,
        row, length, scaling, softcap or 0.0, length if window is None else window,
        GROUPS=max(_MIN_HEADS, triton.next_power_of_2(heads // kv_heads)), HEADS=heads, KV_HEADS=kv_heads,
        SIZE=size, DIMS=max(16, dims), PARTS=parts, HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None, POSITIONS=_POSITIONS, num_warps=4, num_stages=2,
    )  # fmt: skip
    if parts > 1:
        _join[(num * heads,)](mixed, largest, totals, out, SIZE=size, DIMS=dims, PARTS=parts, num_warps=1)
    return out
