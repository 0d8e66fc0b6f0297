"""Kernels of decode steps on CPUs, compiled by Numba: attention that writes the new keys and values and reads
each row's own length, after that of a prompt that rows share, in one call per layer; norms and gates.

Each row, or key head of a row, is computed by one thread in an order that depends on its own length only, so
its result is independent of the batch and of the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from braid.models.attention import LayerCall
from braid.rollout.engines.native.cache import Block, Bucket, DecodeAttention, Prompt

from .calls import Calls, floats_at, ints_at, result_of
from .machine_code import c_function
from .vectors import ORDERED, exp

_FLOAT = np.float32
_intrinsic: Any = intrinsic


_I64, _FLOATS = ir.IntType(64), ir.FloatType()
_AHEAD_BYTES = 8192
"""Keys and values are fetched this early from memory."""


def _fetch_ahead(builder: Any, here: Any, index: Any, num: Any, num_bytes: int, then: Any) -> None:
    """Fetch what follows element `index` of `num` at `here` after _AHEAD_BYTES; near the end, the start of
    what is at `then`."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    ahead = builder.add(index, _I64(_AHEAD_BYTES // num_bytes))
    is_within = builder.icmp_signed("<", ahead, num)
    start = builder.select(is_within, here, builder.sub(then, builder.mul(num, _I64(num_bytes))))
    first = _place(builder, start, ahead, num_bytes)
    for line in range(0, num_bytes, 64):
        at = builder.inttoptr(builder.add(first, _I64(line)), pointer)
        # to read, keep in the second cache, data
        builder.call(prefetch, [at, number(0), number(2), number(1)])


def _vectors(builder: Any, address: Any, size: int) -> list[Any]:
    """`size` floats in memory, as vectors of up to 16."""
    kind = ir.VectorType(_FLOATS, _lanes(size))
    start = builder.inttoptr(address, kind.as_pointer())
    loaded = [builder.load(builder.gep(start, [_I64(i)])) for i in range(size // kind.count)]
    for vector in loaded:
        vector.align = 4
    return loaded


def _lanes(size: int) -> int:
    return next(lanes for lanes in (16, 8, 4, 2, 1) if size % lanes == 0)


def _place(builder: Any, address: Any, index: Any, num_bytes: int) -> Any:
    """The address of an element of `num_bytes`."""
    return builder.add(address, builder.mul(index, _I64(num_bytes)))


def _add_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=["contract"]), total, flags=["contract"])


@_intrinsic(prefer_literal=True)
def _products(
    _: Any, size: Any, heads: Any, _queries: Any, _keys: Any, _num: Any, _out: Any, _stride: Any, _then: Any
) -> Any:
    """Write the inner products of `heads` queries [heads, size] with keys [num, size] to out [heads, stride],
    given as addresses. Each key is loaded once; `then` is what is read next. `size` and `heads` are
    constants."""
    num_heads, length = heads.literal_value, size.literal_value

    def generate(context: Any, builder: Any, __: Any, args: Any) -> Any:
        queries, keys, num, out, stride, then = args[2:]
        kind = ir.VectorType(_FLOATS, _lanes(length))
        name = f"llvm.vector.reduce.fadd.v{kind.count}f32"
        add = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_FLOATS, [_FLOATS, kind]), name)
        of_heads = [
            _vectors(builder, builder.add(queries, _I64(4 * g * length)), length) for g in range(num_heads)
        ]
        with cgutils.for_range(builder, num) as loop:
            _fetch_ahead(builder, keys, loop.index, num, 4 * length, then)
            key = _vectors(builder, _place(builder, keys, loop.index, 4 * length), length)
            for g, query in enumerate(of_heads):
                total = builder.fmul(query[0], key[0])
                for a, b in zip(query[1:], key[1:], strict=True):
                    total = _add_product(builder, total, a, b)
                score = builder.call(add, [_FLOATS(-0.0), total], fastmath=["reassoc"])
                to = _place(builder, out, builder.add(builder.mul(stride, _I64(g)), loop.index), 4)
                builder.store(score, builder.inttoptr(to, _FLOATS.as_pointer()))
        return context.get_dummy_value()

    return types.void(size, heads, *[types.int64] * 6), generate


@_intrinsic(prefer_literal=True)
def _weighted_sums(
    _: Any,
    size: Any,
    heads: Any,
    _weights: Any,
    _stride: Any,
    _values: Any,
    _num: Any,
    _out: Any,
    _adds: Any,
    _then: Any,
) -> Any:
    """Write the sums of values [num, size] with the weights [heads, stride] of `heads` to out [heads, size],
    given as addresses, or add them if `adds` is not 0. Each value is loaded once, and the sums stay in
    registers; `then` is what is read next. `size` and `heads` are constants."""
    num_heads, length = heads.literal_value, size.literal_value

    def generate(context: Any, builder: Any, __: Any, args: Any) -> Any:
        weights, stride, values, num, out, adds, then = args[2:]
        kind = ir.VectorType(_FLOATS, _lanes(length))
        parts = [(g, i) for g in range(num_heads) for i in range(length // kind.count)]
        totals = {part: cgutils.alloca_once(builder, kind) for part in parts}
        places = {
            (g, i): builder.inttoptr(
                builder.add(out, _I64(4 * (g * length + i * kind.count))), kind.as_pointer()
            )
            for g, i in parts
        }
        is_sum = builder.icmp_signed("!=", adds, _I64(0))
        for part, total in totals.items():
            before = builder.load(places[part], align=4)
            builder.store(builder.select(is_sum, before, kind(None)), total)
        with cgutils.for_range(builder, num) as loop:
            _fetch_ahead(builder, values, loop.index, num, 4 * length, then)
            value = _vectors(builder, _place(builder, values, loop.index, 4 * length), length)
            for (g, i), total in totals.items():
                at = _place(builder, weights, builder.add(builder.mul(stride, _I64(g)), loop.index), 4)
                weight = builder.load(builder.inttoptr(at, _FLOATS.as_pointer()))
                one = builder.insert_element(kind(ir.Undefined), weight, ir.IntType(32)(0))
                zeros = ir.VectorType(ir.IntType(32), kind.count)(None)
                wide = builder.shuffle_vector(one, kind(ir.Undefined), zeros)
                builder.store(_add_product(builder, builder.load(total), wide, value[i]), total)
        for part, total in totals.items():
            builder.store(builder.load(total), places[part], align=4)
        return context.get_dummy_value()

    return types.void(size, heads, *[types.int64] * 7), generate


@njit(fastmath=True)
def _largest(x: Any) -> Any:
    most = x[0]
    for i in range(len(x)):
        most = max(most, x[i])
    return most


@njit(fastmath=ORDERED)
def _softmax(scores: Any, softcap: Any, sink: Any) -> Any:
    """Softmax of scores in place. A `softcap` of 0 is none, a `sink` of -inf too."""
    if softcap > 0:
        for t in range(len(scores)):
            scores[t] = np.tanh(scores[t] / softcap) * softcap
    most = max(_largest(scores), sink)
    total = exp(sink - most)
    if sink == -np.inf:
        total = _FLOAT(0)
    for t in range(len(scores)):
        scores[t] = exp(scores[t] - most)
        total += scores[t]
    rate = _FLOAT(1) / total
    for t in range(len(scores)):
        scores[t] *= rate


@njit(fastmath=ORDERED)
def _prepare(x: Any, out: Any, norm: Any, eps: Any, rotary: Any, scale: Any) -> None:
    """Norm (with `norm` [d], if any), rotary embedding (`rotary` [2 d]: cosines, sines, if any) and scale of
    a head."""
    size = len(x)
    if len(norm):
        square = _FLOAT(0)
        for j in range(size):
            square += x[j] * x[j]
        rate = _FLOAT(1) / np.sqrt(square / _FLOAT(size) + eps)
        for j in range(size):
            out[j] = x[j] * rate * norm[j]
    else:
        for j in range(size):
            out[j] = x[j]
    if len(rotary):
        half = size // 2
        for j in range(half):
            a, b = out[j], out[j + half]
            out[j] = a * rotary[j] - b * rotary[size + j]
            out[j + half] = b * rotary[half + j] + a * rotary[size + half + j]
    for j in range(size):
        out[j] *= scale


@njit
def _visible(row: Any, heads: Any, head: Any, window: Any, size: Any) -> Any:
    """How many positions a row sees in its prompt and of its own, and in both places the bytes before the
    first."""
    of_row, length, width = row[2], row[3], row[4]
    of_prompt, num, prompt_width = row[6], row[7], row[8]
    first = max(num + length - window, 0)
    skipped = min(first, num)
    start = first - skipped
    in_prompt = 4 * size * ((of_prompt * heads + head) * prompt_width + skipped)
    return num - skipped, length - start, in_prompt, 4 * size * ((of_row * heads + head) * width + start)


@cache
def _kernel(size: int, groups: int) -> Any:
    """C function of one address, that of the arguments, for heads of `size` of which `groups` share a key
    head."""
    width = size * groups
    together = max(n for n in range(1, groups + 1) if groups % n == 0 and n * size <= max(size, 256))

    @c_function(fastmath=ORDERED)
    def kernel(data: Any) -> None:  # one nest of loops, with `size` a constant
        args = carray(data, (20,), np.int64)
        num_rows, heads, most, window = args[0], args[1], args[2], args[3]
        rows, stores = carray(ints_at(args[4]), (num_rows, 9)), carray(ints_at(args[5]), (args[17], 2))
        options = carray(floats_at(args[6]), (3 + heads * groups,))
        num_threads, thread = result_of(args[18]), result_of(args[19])
        scratch_at = args[11] + 4 * thread * (groups * (most + size) + size)
        scores = carray(floats_at(scratch_at), (groups * most,))
        scaled_at = scratch_at + 4 * groups * most
        scaled = carray(floats_at(scaled_at), (width,))
        # written to the cache when complete: a read of half-written memory would wait for it
        rotated = carray(floats_at(scaled_at + 4 * width), (size,))
        query_norm = carray(floats_at(args[14]), (size if args[14] else 0,))
        key_norm = carray(floats_at(args[15]), (size if args[15] else 0,))
        for item in range(thread, num_rows * heads, num_threads):
            # heads one after another, so that what rows share is still in the processor's caches
            head, of_row = item // num_rows, rows[item % num_rows]
            row, length = of_row[0], of_row[3]
            out_at = args[10] + 4 * (row * heads + head) * width
            if length == 0:  # padding
                out = carray(floats_at(out_at), (width,))
                for j in range(width):
                    out[j] = _FLOAT(0)
                continue
            num_shared, num, in_prompt, start = _visible(of_row, heads, head, window, size)
            total = num_shared + num
            k_at, v_at = stores[of_row[1], 0] + start, stores[of_row[1], 1] + start
            shared_k, shared_v = stores[of_row[5], 0] + in_prompt, stores[of_row[5], 1] + in_prompt
            following = min(item + num_threads, num_rows * heads - 1)
            next_row = rows[following % num_rows]
            after = _visible(next_row, heads, following // num_rows, window, size)
            then = stores[next_row[5], 0] + after[2] if after[0] else stores[next_row[1], 0] + after[3]
            k, v = carray(floats_at(k_at), (num * size,)), carray(floats_at(v_at), (num * size,))
            query = carray(floats_at(args[7] + 4 * (row * args[12] + head * width)), (width,))
            new_k = carray(floats_at(args[8] + 4 * (row * args[13] + head * size)), (size,))
            new_v = carray(floats_at(args[9] + 4 * (row * args[13] + head * size)), (size,))
            rotary = carray(floats_at(args[16] + 8 * row * size), (2 * size if args[16] else 0,))
            last = (num - 1) * size
            _prepare(new_k, rotated, key_norm, options[2], rotary, _FLOAT(1))
            for j in range(size):
                k[last + j], v[last + j] = rotated[j], new_v[j]
            for g in range(groups):
                at = g * size
                q, prepared = query[at : at + size], scaled[at : at + size]
                _prepare(q, prepared, query_norm, options[2], rotary, options[0])
            for g in range(0, groups, together):
                of_g, to = scaled_at + 4 * g * size, scratch_at + 4 * g * most
                if num_shared:
                    _products(size, together, of_g, shared_k, num_shared, to, most, k_at)
                values = shared_v if num_shared else v_at
                _products(size, together, of_g, k_at, num, to + 4 * num_shared, most, values)
            for g in range(groups):
                _softmax(scores[g * most : g * most + total], options[1], options[3 + head * groups + g])
            for g in range(0, groups, together):
                weights, to = scratch_at + 4 * g * most, out_at + 4 * g * size
                if num_shared:
                    _weighted_sums(size, together, weights, most, shared_v, num_shared, to, 0, v_at)
                weights += 4 * num_shared
                _weighted_sums(size, together, weights, most, v_at, num, to, num_shared, then)

    return kernel


class CompiledAttention(DecodeAttention):
    """DecodeAttention of float32 keys and values by the kernel above; of others as before."""

    def __init__(self, positions: Tensor, blocks: Sequence[Block]) -> None:
        super().__init__(positions, blocks)
        self._buckets = list(dict.fromkeys(block.bucket for block in blocks))
        for bucket in self._buckets:
            if not bucket.layers and (prompt := bucket.prompts[0]):
                for layer, stores in prompt.bucket.layers.items():
                    bucket.allocate(layer, *stores)
        self._longest = max(bucket.length + bucket.longest_prompt for bucket in self._buckets)
        # Of each row: its place in the batch; store, row in it, length and width of its own keys and values;
        # those of its prompt. Stores are numbered; their addresses are by layer.
        self._rows = np.zeros((len(positions), 9), np.int64)
        most = len(self._buckets) + len(positions)
        self._stores = np.zeros((len(self._buckets[0].layers), most, 2), np.int64)
        self._number = dict[Bucket, int]()
        self._prompts: list[list[Prompt | None]] | None = None
        self.move(positions, blocks)

    def move(self, positions: Tensor, blocks: Sequence[Block]) -> None:
        """Continue with other positions, in the same buckets."""
        prompts = [list(bucket.prompts) for bucket in self._buckets]
        if prompts != self._prompts:
            self._prompts = prompts
            self._set_rows(blocks)
        lengths = positions.numpy()[self._rows[:, 0]] + 1 - self._rows[:, 7]
        self._rows[:, 3] = np.where(self._rows[:, 4] > 0, lengths, 0)

    def _set_rows(self, blocks: Sequence[Block]) -> None:
        """Rows of the same prompt follow one another; padding has no width."""
        assert self._prompts is not None
        shared = dict.fromkeys(prompt.bucket for prompts in self._prompts for prompt in prompts if prompt)
        number = {bucket: i for i, bucket in enumerate([*self._buckets, *shared])}
        if number != self._number:
            self._number = number
            for bucket, i in number.items():
                for layer, stores in bucket.layers.items():
                    self._stores[layer, i] = [store.data_ptr() for store in stores]
        rows = np.zeros_like(self._rows)
        rows[:, 0] = np.arange(len(rows))
        for block in blocks:
            bucket, places = block.bucket, block.places
            rows[places, 1], rows[places, 4] = number[bucket], bucket.length
            rows[places, 2] = np.arange(block.rows.start, block.rows.stop)
            rows[places, 5:] = [
                (number[prompt.bucket], prompt.row, prompt.length, prompt.bucket.length)
                if prompt
                else (0,) * 4
                for prompt in bucket.prompts[block.rows]
            ]
        self._rows[:] = rows[np.lexsort((rows[:, 6], rows[:, 5]))]

    def _of_layer(self, layer: int, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store = self._buckets[0].layers[layer][0]
        is_float = all(x.dtype == torch.float32 for x in (query, key, value, store))
        if not (is_float and query.shape[2] == key.shape[2] == value.shape[2]):
            return super()._of_layer(layer, call, query, key, value)
        query, key, value = (x.contiguous() for x in (query, key, value))
        return self.attend_prepared(replace(call, layer=layer), query, key, value, Preparation(), Calls())

    def attend_prepared(
        self,
        call: LayerCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        preparation: Preparation,
        calls: Calls,
    ) -> Tensor:
        """Attention [B, Hq, d] of float32 queries [B, Hq, d], keys and values [B, Hkv, d] after the
        preparation. Rows may be apart. `call.layer` is the cache's number."""
        (heads, size), (num, num_queries) = key.shape[1:], query.shape[:2]
        groups, longest = num_queries // heads, self._longest
        sinks = None if call.sinks is None else tuple(call.sinks.tolist())
        options = _options(
            call.scaling, call.softcap or 0.0, preparation.eps, sinks or (-np.inf,) * num_queries
        )
        out = calls.empty("mixed", num, num_queries, size)
        scratch = calls.empty("scratch", torch.get_num_threads(), groups * (longest + size) + size)
        calls.run(
            _kernel(size, groups),
            *(
                num,
                heads,
                longest,
                call.sliding_window or longest,
                self._rows,
                self._stores[call.layer],
                options,
            ),
            *(query, key, value, out, scratch, query.stride(0), key.stride(0)),
            *(preparation.query_norm, preparation.key_norm, preparation.rotary, self._stores.shape[1]),
        )
        return out


@c_function(fastmath=ORDERED)
def _prepare_rows(data: Any) -> None:
    """Prepare heads in place. Arguments: rows, heads of a row, size of a head; addresses of the heads, norm,
    rotary embedding, epsilon; distance of rows."""
    args = carray(data, (10,), np.int64)
    heads, size, num_threads, thread = args[1], args[2], result_of(args[8]), result_of(args[9])
    norm, eps = carray(floats_at(args[4]), (size if args[4] else 0,)), carray(floats_at(args[6]), (1,))[0]
    for row in range(thread, args[0], num_threads):
        rotary = carray(floats_at(args[5] + 8 * row * size), (2 * size if args[5] else 0,))
        for head in range(heads):
            x = carray(floats_at(args[3] + 4 * (row * args[7] + head * size)), (size,))
            _prepare(x, x, norm, eps, rotary, _FLOAT(1))


def prepared(
    query: Tensor, key: Tensor, value: Tensor, preparation: Preparation
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, Hq, d] and keys [B, Hkv, d] prepared in place, and the values. Rows may be apart."""
    eps = torch.tensor(preparation.eps)
    for x, norm in ((query, preparation.query_norm), (key, preparation.key_norm)):
        Calls().run(_prepare_rows, *x.shape, x, norm, preparation.rotary, eps, x.stride(0))
    return query, key, value


class Preparation(NamedTuple):
    """Norms [d] of queries and keys with their epsilon, and cosines and sines [B, 2 d] of the rotary
    embedding."""

    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    rotary: Tensor | None = None
    eps: float = 0.0


@lru_cache(maxsize=256)  # in a model without sinks, few
def _options(scaling: float, softcap: float, eps: float, sinks: tuple[float, ...]) -> ctypes.Array[Any]:
    return (ctypes.c_float * (3 + len(sinks)))(scaling, softcap, eps, *sinks)


@c_function(fastmath=ORDERED)
def add_and_norm(data: Any) -> None:
    """x [rows, size] += delta, if any; out = x / rms(x) * weight. Arguments: rows, size; addresses of x,
    delta, weight, epsilon and out; distance of delta's rows."""
    args = carray(data, (10,), np.int64)
    size, num_threads, thread = args[1], result_of(args[8]), result_of(args[9])
    weight, eps = carray(floats_at(args[4]), (size,)), carray(floats_at(args[5]), (1,))[0]
    for row in range(thread, args[0], num_threads):
        at = 4 * row * size
        x, out = carray(floats_at(args[2] + at), (size,)), carray(floats_at(args[6] + at), (size,))
        if args[3]:
            delta = carray(floats_at(args[3] + 4 * row * args[7]), (size,))
            for j in range(size):
                x[j] += delta[j]
        square = _FLOAT(0)
        for j in range(size):
            square += x[j] * x[j]
        rate = _FLOAT(1) / np.sqrt(square / _FLOAT(size) + eps)
        for j in range(size):
            out[j] = x[j] * rate * weight[j]


@c_function(fastmath=ORDERED)
def gate(data: Any) -> None:
    """out [rows, size] = silu(x[:, :size]) * x[:, size:]. Arguments: rows, size; addresses of x and out;
    distance of x's rows."""
    args = carray(data, (7,), np.int64)
    size, num_threads, thread = args[1], result_of(args[5]), result_of(args[6])
    for row in range(thread, args[0], num_threads):
        x = carray(floats_at(args[2] + 4 * row * args[4]), (2 * size,))
        out = carray(floats_at(args[3] + 4 * row * size), (size,))
        for j in range(size):
            small = exp(-abs(x[j]))
            out[j] = x[j] * (_FLOAT(1) if x[j] > 0 else small) / (_FLOAT(1) + small) * x[size + j]
