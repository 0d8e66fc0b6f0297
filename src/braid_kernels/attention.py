"""Causal attention over right-padded rows in float32 on CPUs, forward and backward, compiled by Numba.

FlashAttention-2's recomputation (arXiv 2307.08691) with whole rows of scores in cache instead of an online
softmax: the forward pass keeps the logarithm of each softmax's sum, from which the backward pass computes the
probabilities again. Only blocks of keys that a query can see are computed, and one thread computes a head, in
a fixed order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.models.attention import LayerCall, causal_attention

from .calls import Calls, floats_at, result_of
from .machine_code import c_function
from .vectors import HAS_AVX512, LANES, ORDERED, exp, tile_product

_VECTORS, _ROWS = (2, 12) if HAS_AVX512 else (1, 6)
_COLUMNS = LANES * _VECTORS
_DEPTH = 256
"""Terms that are added one after another."""
_QUERIES = 48
"""Queries of which the backward pass computes the probabilities together."""
_LARGEST_HEAD = 256
_FLOAT = np.float32
_multiply = tile_product(_VECTORS, _ROWS)


@njit
def _product(  # noqa: PLR0913  # addresses and their strides
    num: Any, x: Any, x_stride: Any, x_step: Any, panel: Any, panel_stride: Any, depth: Any, zeros: Any,
    out: Any, stride: Any, adds: Any,
) -> None:  # fmt: skip
    """out [num, columns] = x [num, depth] @ panel [depth, columns], or += if `adds`, of addresses and strides
    in bytes."""
    for row in range(0, num, _ROWS):
        rows, added, added_stride = min(num - row, _ROWS), out + row * stride, stride
        if not adds:
            added, added_stride = zeros, 0
        for start in range(0, depth, _DEPTH):
            terms = min(depth - start, _DEPTH)
            at, panel_at = x + row * x_stride + start * x_step, panel + start * panel_stride
            _multiply(
                rows,
                at,
                x_stride,
                x_step,
                panel_at,
                panel_stride,
                terms,
                added,
                added_stride,
                out + row * stride,
                stride,
                0,
                0,
            )
            added, added_stride = out + row * stride, stride


@njit
def _transpose(x: Any, stride: Any, length: Any, out: Any) -> None:
    """Rows of x, `stride` apart in memory, as columns of panels [blocks, size, columns]; columns from
    `length` on are 0."""
    blocks, size, columns = out.shape
    for block in range(blocks):
        start = block * columns
        for j in range(size):
            for i in range(min(length - start, columns)):
                out[block, j, i] = x[(start + i) * stride + j]
            for i in range(length - start, columns):
                out[block, j, i] = _FLOAT(0)


@njit(fastmath=True)
def _largest(x: Any) -> Any:
    most = x[0]
    for i in range(len(x)):
        most = max(most, x[i])
    return most


@njit(fastmath=ORDERED)
def _softmax(scores: Any, scale: Any) -> Any:
    """Softmax of scores * scale in place; the logarithm of the sum of exponentials."""
    most, total = _largest(scores), _FLOAT(0)
    for k in range(len(scores)):
        scores[k] = exp((scores[k] - most) * scale)
        total += scores[k]
    rate = _FLOAT(1) / total
    for k in range(len(scores)):
        scores[k] *= rate
    return most * scale + np.log(total)


@njit(fastmath=ORDERED)
def _gradients(p: Any, ds: Any, log: Any, delta: Any, scale: Any) -> None:
    """p from scores to probabilities, ds from gradients of probabilities to those of scores."""
    for k in range(len(p)):
        p[k] = exp(min(p[k] * scale - log, _FLOAT(0)))
        ds[k] = p[k] * (ds[k] - delta) * scale


@njit
def _clear(x: Any) -> None:
    for j in range(len(x)):
        x[j] = _FLOAT(0)


@njit(fastmath=ORDERED)
def _inner(a: Any, b: Any) -> Any:
    total = _FLOAT(0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@cache
def _forward(size: int) -> Any:
    @c_function()
    def forward(data: Any) -> None:
        """Arguments: rows, length, query heads, key heads, window; addresses of scale, queries, keys, values,
        out, logarithms, scratch and its floats for each thread."""
        args = carray(data, (15,), np.int64)
        num, length, heads, kv_heads, window = args[0], args[1], args[2], args[3], args[4]
        scale, num_threads, thread = (
            carray(floats_at(args[5]), (1,))[0],
            result_of(args[13]),
            result_of(args[14]),
        )
        groups, width = heads // kv_heads, (length + _COLUMNS - 1) // _COLUMNS * _COLUMNS
        query_stride, key_stride, columns = 4 * heads * size, 4 * kv_heads * size, 4 * _COLUMNS
        zeros = args[11] + 4 * thread * args[12]
        keys, scores_at = zeros + columns, zeros + columns + 4 * size * width
        _clear(carray(floats_at(zeros), (_COLUMNS,)))
        panels = carray(floats_at(keys), (width // _COLUMNS, size, _COLUMNS))
        scores, logs = (
            carray(floats_at(scores_at), (_ROWS, width)),
            carray(floats_at(args[10]), (num, heads, length)),
        )
        for item in range(thread, num * kv_heads, num_threads):
            row, head = item // kv_heads, item % kv_heads
            base = row * length * key_stride + 4 * head * size
            _transpose(carray(floats_at(args[7] + base), (1,)), kv_heads * size, length, panels)
            for of_head in range(head * groups, (head + 1) * groups):
                for start in range(0, length, _ROWS):
                    rows = min(length - start, _ROWS)
                    end, at = start + rows, (row * length + start) * query_stride + 4 * of_head * size
                    first = max(0, start + 1 - window) // _COLUMNS * _COLUMNS
                    for key in range(first, end, _COLUMNS):
                        panel, to = keys + 4 * size * key, scores_at + 4 * key
                        _product(
                            rows,
                            args[6] + at,
                            query_stride,
                            4,
                            panel,
                            columns,
                            size,
                            zeros,
                            to,
                            4 * width,
                            False,
                        )
                    for i in range(rows):
                        last = start + i + 1
                        begin = max(0, last - window)
                        _clear(scores[i, first:begin])
                        _clear(scores[i, last:end])
                        logs[row, of_head, start + i] = _softmax(scores[i, begin:last], scale)
                    panel, num_keys = args[8] + base + first * key_stride, end - first
                    for j in range(0, 4 * size, columns):
                        p, to = scores_at + 4 * first, args[9] + at + j
                        _product(
                            rows,
                            p,
                            4 * width,
                            4,
                            panel + j,
                            key_stride,
                            num_keys,
                            zeros,
                            to,
                            query_stride,
                            False,
                        )

    return forward


@cache
def _backward(size: int) -> Any:
    @c_function()
    def backward(data: Any) -> None:
        """Arguments: rows, length, query heads, key heads, window; addresses of scale, queries, keys, values,
        out, logarithms, the gradient of out, those of queries, keys and values, scratch and its floats for
        each thread."""
        args = carray(data, (19,), np.int64)
        num, length, heads, kv_heads, window = args[0], args[1], args[2], args[3], args[4]
        scale, num_threads, thread = (
            carray(floats_at(args[5]), (1,))[0],
            result_of(args[17]),
            result_of(args[18]),
        )
        groups, width = heads // kv_heads, (length + _COLUMNS - 1) // _COLUMNS * _COLUMNS
        query_stride, key_stride, columns = 4 * heads * size, 4 * kv_heads * size, 4 * _COLUMNS
        zeros = args[15] + 4 * thread * args[16]
        keys, values = zeros + columns, zeros + columns + 4 * size * width
        p_at, ds_at = values + 4 * size * width, values + 4 * size * width + 4 * _QUERIES * width
        _clear(carray(floats_at(zeros), (_COLUMNS,)))
        key_panels = carray(floats_at(keys), (width // _COLUMNS, size, _COLUMNS))
        value_panels = carray(floats_at(values), (width // _COLUMNS, size, _COLUMNS))
        ps, dss = carray(floats_at(p_at), (_QUERIES, width)), carray(floats_at(ds_at), (_QUERIES, width))
        logs = carray(floats_at(args[10]), (num, heads, length))
        for item in range(thread, num * kv_heads, num_threads):
            row, head = item // kv_heads, item % kv_heads
            base = row * length * key_stride + 4 * head * size
            _transpose(carray(floats_at(args[7] + base), (1,)), kv_heads * size, length, key_panels)
            _transpose(carray(floats_at(args[8] + base), (1,)), kv_heads * size, length, value_panels)
            for i in range(length):
                _clear(carray(floats_at(args[13] + base + i * key_stride), (size,)))
                _clear(carray(floats_at(args[14] + base + i * key_stride), (size,)))
            for of_head in range(head * groups, (head + 1) * groups):
                for start in range(0, length, _QUERIES):
                    rows = min(length - start, _QUERIES)
                    end, at = start + rows, (row * length + start) * query_stride + 4 * of_head * size
                    first = max(0, start + 1 - window) // _COLUMNS * _COLUMNS
                    query, grad = args[6] + at, args[11] + at
                    for key in range(first, end, _COLUMNS):
                        panel, to = 4 * size * key, 4 * key
                        _product(
                            rows,
                            query,
                            query_stride,
                            4,
                            keys + panel,
                            columns,
                            size,
                            zeros,
                            p_at + to,
                            4 * width,
                            False,
                        )
                        _product(
                            rows,
                            grad,
                            query_stride,
                            4,
                            values + panel,
                            columns,
                            size,
                            zeros,
                            ds_at + to,
                            4 * width,
                            False,
                        )
                    for i in range(rows):
                        last = start + i + 1
                        begin = max(0, last - window)
                        out = carray(floats_at(args[9] + at + i * query_stride), (size,))
                        delta = _inner(out, carray(floats_at(grad + i * query_stride), (size,)))
                        for matrix in (ps, dss):
                            _clear(matrix[i, first:begin])
                            _clear(matrix[i, last:end])
                        _gradients(
                            ps[i, begin:last], dss[i, begin:last], logs[row, of_head, start + i], delta, scale
                        )
                    p, ds, num_keys, here = (
                        p_at + 4 * first,
                        ds_at + 4 * first,
                        end - first,
                        base + first * key_stride,
                    )
                    for j in range(0, 4 * size, columns):
                        to = args[14] + here + j
                        _product(
                            num_keys,
                            p,
                            4,
                            4 * width,
                            grad + j,
                            query_stride,
                            rows,
                            zeros,
                            to,
                            key_stride,
                            True,
                        )
                        to = args[13] + here + j
                        _product(
                            num_keys,
                            ds,
                            4,
                            4 * width,
                            query + j,
                            query_stride,
                            rows,
                            zeros,
                            to,
                            key_stride,
                            True,
                        )
                        to = args[12] + at + j
                        _product(
                            rows,
                            ds,
                            4 * width,
                            4,
                            args[7] + here + j,
                            key_stride,
                            num_keys,
                            zeros,
                            to,
                            query_stride,
                            False,
                        )

    return backward


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        query, key, value = (x.contiguous() for x in (query, key, value))
        (num, length, heads, size), kv_heads = query.shape, key.shape[2]
        out, logs = torch.empty_like(query), query.new_empty(num, heads, length)
        sizes = num, length, heads, kv_heads, window or length
        width = -(-length // _COLUMNS) * _COLUMNS
        floats = _COLUMNS + (size + _ROWS) * width
        scratch, scaling = query.new_empty(torch.get_num_threads(), floats), torch.tensor(scale)
        Calls().run(_forward(size), *sizes, scaling, query, key, value, out, logs, scratch, floats)
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.scale, ctx.sizes = scale, sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, logs = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (query, key, value)]
        length, size = query.shape[1], query.shape[3]
        width = -(-length // _COLUMNS) * _COLUMNS
        floats = _COLUMNS + 2 * (size + _QUERIES) * width
        scratch, scale = query.new_empty(torch.get_num_threads(), floats), torch.tensor(ctx.scale)
        tensors = scale, query, key, value, out, logs, grad.contiguous(), *grads, scratch
        Calls().run(_backward(size), *ctx.sizes, *tensors, floats)
        return *grads, None, None


def compiled_attention(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """See causal_attention, to which softcaps, sinks, float64, and heads whose size is no multiple of 32 or
    above 256 are left."""
    size = query.shape[-1]
    if (
        call.softcap is not None
        or call.sinks is not None
        or not key.shape[-1] == value.shape[-1] == size <= _LARGEST_HEAD
        or size % 32
        or torch.float64 in (query.dtype, key.dtype, value.dtype)
    ):
        return causal_attention(call, query, key, value)
    out = _Attention.apply(query.float(), key.float(), value.float(), call.scaling, call.sliding_window)
    return out.to(value.dtype)
