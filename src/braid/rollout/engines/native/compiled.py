"""Kernels of decode steps on CPUs, compiled by Numba: attention that writes the new keys and values and reads each row's own
length, in one call per layer; norms and gates.

Each row, or key head of a row, is computed by one thread in an order that depends on its own length only, so its result
is independent of the batch and of the number of threads. Threads are those of PyTorch: a second pool would compete with it
for the cores. Machine code is kept on disk by Numba, beside this file or in its cache folder (NUMBA_CACHE_DIR).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

from braid.models.attention import LayerCall

from .cache import Block, DecodeAttention

_FLOAT = np.float32
_intrinsic: Any = intrinsic
_ORDERED = {"contract", "reassoc", "nsz", "arcp"}  # but NaN stays NaN


def _pointer_to(kind: types.Type) -> Any:
    @_intrinsic
    def pointer(_: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_floats_at, _ints_at = _pointer_to(types.float32), _pointer_to(types.int64)


@_intrinsic
def _call(_: Any, _address: Any) -> Any:
    """The result of the C function `int f(void)` at an address."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(args[0], function), []), ir.IntType(64))

    return types.int64(types.int64), generate


@_intrinsic
def _power_of_two(_: Any, _exponent: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        bits = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.add(args[0], bits(127)), bits(23)), ir.FloatType())

    return types.float32(types.int32), generate


@njit(fastmath=_ORDERED)
def _exp(x: Any) -> Any:
    """exp(x) for x <= 0 within 2 ulp, by the polynomial of Cephes, since a call of libm cannot be vectorised."""
    x = _FLOAT(-87.0) if x < _FLOAT(-87.0) else x
    power = np.floor(x * _FLOAT(1.44269504) + _FLOAT(0.5))
    x = x - power * _FLOAT(0.693359375) + power * _FLOAT(2.12194440e-4)
    y = _FLOAT(1.9875691500e-4)
    y = y * x + _FLOAT(1.3981999507e-3)
    y = y * x + _FLOAT(8.3334519073e-3)
    y = y * x + _FLOAT(4.1665795894e-2)
    y = y * x + _FLOAT(1.6666665459e-1)
    y = y * x + _FLOAT(5.0000001201e-1)
    return (y * x * x + x + _FLOAT(1)) * _power_of_two(np.int32(power))


@njit(fastmath=True)
def _largest(x: Any) -> Any:
    most = x[0]
    for i in range(len(x)):
        most = max(most, x[i])
    return most


@njit(fastmath=_ORDERED)
def _softmax(scores: Any, softcap: Any, sink: Any) -> Any:
    """Softmax of scores in place. A `softcap` of 0 is none, a `sink` of -inf too."""
    if softcap > 0:
        for t in range(len(scores)):
            scores[t] = np.tanh(scores[t] / softcap) * softcap
    most = max(_largest(scores), sink)
    total = _exp(sink - most)
    if sink == -np.inf:
        total = _FLOAT(0)
    for t in range(len(scores)):
        scores[t] = _exp(scores[t] - most)
        total += scores[t]
    for t in range(len(scores)):
        scores[t] /= total


@njit(fastmath=_ORDERED)
def _prepare(x: Any, out: Any, norm: Any, eps: Any, rotary: Any, scale: Any) -> None:
    """Norm (with `norm` [d], if any), rotary embedding (`rotary` [2 d]: cosines, sines, if any) and scale of a head."""
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


@cache
def _kernel(size: int, groups: int) -> Any:  # noqa: C901
    """C function of one address, that of the arguments, for heads of `size` of which `groups` share a key head."""
    width = size * groups

    @cfunc(types.void(types.voidptr), fastmath=_ORDERED, error_model="numpy", cache=True)
    def kernel(data: Any) -> None:  # noqa: C901  # one nest of loops, with `size` a constant
        args = carray(data, (20,), np.int64)
        num_rows, heads, most, window = args[0], args[1], args[2], args[3]
        rows, buckets = carray(_ints_at(args[4]), (num_rows, 3)), carray(_ints_at(args[5]), (num_rows, 3))
        options = carray(_floats_at(args[6]), (3 + heads * groups,))
        num_threads, thread = _call(args[18]), _call(args[19])
        own = args[11] + 4 * thread * groups * (most + size)
        scores = carray(_floats_at(own), (groups * most,))
        scaled = carray(_floats_at(own + 4 * groups * most), (width,))
        query_norm = carray(_floats_at(args[14]), (size if args[14] else 0,))
        key_norm = carray(_floats_at(args[15]), (size if args[15] else 0,))
        for item in range(thread, num_rows * heads, num_threads):
            row, head = item // heads, item % heads
            bucket, length = rows[row, 0], rows[row, 2]
            num = min(length, window)
            strip = 4 * size * ((rows[row, 1] * heads + head) * buckets[bucket, 2] + length - num)
            k = carray(_floats_at(buckets[bucket, 0] + strip), (num * size,))
            v = carray(_floats_at(buckets[bucket, 1] + strip), (num * size,))
            query = carray(_floats_at(args[7] + 4 * (row * args[12] + head * width)), (width,))
            new_k = carray(_floats_at(args[8] + 4 * (row * args[13] + head * size)), (size,))
            new_v = carray(_floats_at(args[9] + 4 * (row * args[13] + head * size)), (size,))
            rotary = carray(_floats_at(args[16] + 8 * row * size), (2 * size if args[16] else 0,))
            out = carray(_floats_at(args[10] + 4 * item * width), (width,))
            last = (num - 1) * size
            _prepare(new_k, k[last : last + size], key_norm, options[2], rotary, _FLOAT(1))
            for j in range(size):
                v[last + j] = new_v[j]
            for g in range(groups):
                at = g * size
                q, prepared = query[at : at + size], scaled[at : at + size]
                _prepare(q, prepared, query_norm, options[2], rotary, options[0])
            for j in range(width):
                out[j] = _FLOAT(0)
            for t in range(num):
                for g in range(groups):
                    score = _FLOAT(0)
                    for j in range(size):
                        score += scaled[g * size + j] * k[t * size + j]
                    scores[g * most + t] = score
            for g in range(groups):
                weights, mean = scores[g * most : g * most + num], out[g * size : g * size + size]
                _softmax(weights, options[1], options[3 + head * groups + g])
                whole = num // 4 * 4
                for t in range(0, whole, 4):
                    a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
                    for j in range(size):
                        at = t * size + j
                        mean[j] += a * v[at] + b * v[at + size] + c * v[at + 2 * size] + d * v[at + 3 * size]
                for t in range(whole, num):
                    for j in range(size):
                        mean[j] += weights[t] * v[t * size + j]

    return kernel


@cache
def openmp() -> tuple[Any, int, int]:
    """GOMP_parallel of the OpenMP library that PyTorch uses, and the addresses of omp_get_num_threads and
    omp_get_thread_num. Raises AttributeError or OSError if PyTorch uses another one."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    functions = (library.omp_get_num_threads, library.omp_get_thread_num)
    num_threads, thread = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return parallel, num_threads, thread


class CompiledAttention(DecodeAttention):
    """DecodeAttention of float32 keys and values by the kernel above; of others as before."""

    def __init__(self, positions: Tensor, blocks: Sequence[Block]) -> None:
        super().__init__(positions, blocks)
        self._buckets = list(dict.fromkeys(block.bucket for block in blocks))
        num = blocks[-1].places.stop
        self._rows = np.empty((num, 3), np.int64)  # bucket, row in it, length
        for block in blocks:
            places = block.places
            self._rows[places, 0] = self._buckets.index(block.bucket)
            self._rows[places, 1] = np.arange(block.rows.start, block.rows.stop)
        self._rows[:, 2] = positions[:num].numpy() + 1
        self._longest = int(self._rows[:, 2].max())

    def _of_layer(self, layer: int, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store = self._buckets[0].layers[layer][0]
        is_float = all(x.dtype == torch.float32 for x in (query, key, value, store))
        if not (is_float and query.shape[2] == key.shape[2] == value.shape[2]):
            return super()._of_layer(layer, call, query, key, value)
        query, key, value = (x.contiguous() for x in (query, key, value))
        return self.attend_prepared(replace(call, layer=layer), query, key, value, Preparation())

    def attend_prepared(
        self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor, preparation: Preparation
    ) -> Tensor:
        """Attention [B, Hq, d] of float32 queries [B, Hq, d], keys and values [B, Hkv, d] after the preparation. Rows may
        be apart. `call.layer` is the cache's number."""
        (heads, size), (num, num_queries) = key.shape[1:], query.shape[:2]
        groups, num_threads = num_queries // heads, torch.get_num_threads()
        stores = [bucket.layers[call.layer] for bucket in self._buckets]
        buckets = np.array([[*(x.data_ptr() for x in of), of[0].shape[2]] for of in stores])
        sinks = [-np.inf] * num_queries if call.sinks is None else call.sinks.tolist()
        options = np.array([call.scaling, call.softcap or 0.0, preparation.eps, *sinks], np.float32)
        out = torch.empty(num, num_queries, size)
        out[len(self._rows) :] = 0.0
        scratch = torch.empty(num_threads, groups * (self._longest + size))
        sizes = len(self._rows), heads, self._longest, call.sliding_window or self._longest
        arrays = (x.ctypes.data for x in (self._rows, buckets, options))
        tensors = (x.data_ptr() for x in (query, key, value, out, scratch))
        more = (preparation.query_norm, preparation.key_norm, preparation.rotary)
        optional = (0 if x is None else x.data_ptr() for x in more)
        in_parallel(
            _kernel(size, groups), *sizes, *arrays, *tensors, query.stride(0), key.stride(0), *optional, 0
        )
        return out


class Preparation(NamedTuple):
    """Norms [d] of queries and keys with their epsilon, and cosines and sines [B, 2 d] of the rotary embedding."""

    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    rotary: Tensor | None = None
    eps: float = 0.0


def in_parallel(function: Any, *args: int) -> None:
    """Run a C function of one address, that of `args` and of two functions (number of threads, this thread), on
    PyTorch's threads."""
    parallel, *functions = openmp()
    given = np.array([*args, *functions])
    parallel(function.address, given.ctypes.data, torch.get_num_threads(), 0)


@cfunc(types.void(types.voidptr), fastmath=_ORDERED, error_model="numpy", cache=True)
def add_and_norm(data: Any) -> None:
    """x [rows, size] += delta, if any; out = x / rms(x) * weight. Arguments: addresses of x, delta, weight, out and
    epsilon; rows, size."""
    args = carray(data, (9,), np.int64)
    size, num_threads, thread = args[6], _call(args[7]), _call(args[8])
    weight, eps = carray(_floats_at(args[2]), (size,)), carray(_floats_at(args[4]), (1,))[0]
    for row in range(thread, args[5], num_threads):
        at = 4 * row * size
        x, out = carray(_floats_at(args[0] + at), (size,)), carray(_floats_at(args[3] + at), (size,))
        if args[1]:
            delta = carray(_floats_at(args[1] + at), (size,))
            for j in range(size):
                x[j] += delta[j]
        square = _FLOAT(0)
        for j in range(size):
            square += x[j] * x[j]
        rate = _FLOAT(1) / np.sqrt(square / _FLOAT(size) + eps)
        for j in range(size):
            out[j] = x[j] * rate * weight[j]


@cfunc(types.void(types.voidptr), fastmath=_ORDERED, error_model="numpy", cache=True)
def gate(data: Any) -> None:
    """out [rows, size] = silu(x[:, :size]) * x[:, size:]. Arguments: addresses of x and out; rows, size."""
    args = carray(data, (6,), np.int64)
    size, num_threads, thread = args[3], _call(args[4]), _call(args[5])
    for row in range(thread, args[2], num_threads):
        x = carray(_floats_at(args[0] + 8 * row * size), (2 * size,))
        out = carray(_floats_at(args[1] + 4 * row * size), (size,))
        for j in range(size):
            small = _exp(-abs(x[j]))
            out[j] = x[j] * (_FLOAT(1) if x[j] > 0 else small) / (_FLOAT(1) + small) * x[size + j]
