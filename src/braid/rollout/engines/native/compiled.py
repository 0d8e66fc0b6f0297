"""Decode attention on CPUs, compiled by Numba: writes the new keys and values and attends to each row's own length, in
one call per layer.

Each (row, key head) is computed by one thread in an order that depends on its own length only, so its result is
independent of the batch and of the number of threads. Threads are those of PyTorch: a second pool would compete with it
for the cores. Machine code is kept on disk by Numba, beside this file or in its cache folder (NUMBA_CACHE_DIR).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

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


@cache
def _kernel(size: int, groups: int) -> Any:  # noqa: C901  # one nest of loops, with `size` a constant
    """C function of one address, that of the arguments, for heads of `size` of which `groups` share a key head."""
    width = size * groups

    @cfunc(types.void(types.voidptr), fastmath=_ORDERED, error_model="numpy", cache=True)
    def kernel(data: Any) -> None:
        args = carray(data, (14,), np.int64)
        num_rows, heads, most, window = args[0], args[1], args[2], args[3]
        rows, buckets = carray(_ints_at(args[4]), (num_rows, 3)), carray(_ints_at(args[5]), (num_rows, 3))
        options = carray(_floats_at(args[6]), (2 + heads * groups,))
        num_threads, thread = _call(args[12]), _call(args[13])
        own = args[11] + 4 * thread * groups * (most + size)
        scores, scaled = (
            carray(_floats_at(own), (groups * most,)),
            carray(_floats_at(own + 4 * groups * most), (width,)),
        )
        for item in range(thread, num_rows * heads, num_threads):
            row, head = item // heads, item % heads
            bucket, length = rows[row, 0], rows[row, 2]
            num = min(length, window)
            strip = 4 * size * ((rows[row, 1] * heads + head) * buckets[bucket, 2] + length - num)
            k = carray(_floats_at(buckets[bucket, 0] + strip), (num * size,))
            v = carray(_floats_at(buckets[bucket, 1] + strip), (num * size,))
            query = carray(_floats_at(args[7] + 4 * item * width), (width,))
            new_k = carray(_floats_at(args[8] + 4 * item * size), (size,))
            new_v = carray(_floats_at(args[9] + 4 * item * size), (size,))
            out = carray(_floats_at(args[10] + 4 * item * width), (width,))
            last = (num - 1) * size
            for j in range(size):
                k[last + j], v[last + j] = new_k[j], new_v[j]
            for j in range(width):
                scaled[j] = query[j] * options[0]
                out[j] = _FLOAT(0)
            for t in range(num):
                for g in range(groups):
                    score = _FLOAT(0)
                    for j in range(size):
                        score += scaled[g * size + j] * k[t * size + j]
                    scores[g * most + t] = score
            for g in range(groups):
                weights, mean = scores[g * most : g * most + num], out[g * size : g * size + size]
                _softmax(weights, options[1], options[2 + head * groups + g])
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
        stores = [bucket.layers[layer] for bucket in self._buckets]
        is_float = all(x.dtype == torch.float32 for x in (query, key, value, *stores[0]))
        if not (is_float and query.shape[2] == key.shape[2] == value.shape[2]):
            return super()._of_layer(layer, call, query, key, value)
        heads, size = key.shape[1:]
        groups, num_threads = query.shape[1] // heads, torch.get_num_threads()
        parallel, *functions = openmp()
        kernel = _kernel(size, groups)
        buckets = np.array([[*(x.data_ptr() for x in of), of[0].shape[2]] for of in stores])
        sinks = np.full(heads * groups, -np.inf) if call.sinks is None else call.sinks.float().numpy()
        options = np.array([call.scaling, call.softcap or 0.0, *sinks], np.float32)
        query, key, value = (x.contiguous() for x in (query, key, value))
        out = torch.empty_like(query)
        out[len(self._rows) :] = 0.0
        scratch = torch.empty(num_threads, groups * (self._longest + size))
        sizes = len(self._rows), heads, self._longest, call.sliding_window or self._longest
        arrays = (x.ctypes.data for x in (self._rows, buckets, options))
        tensors = (x.data_ptr() for x in (query, key, value, out, scratch))
        args = np.array([*sizes, *arrays, *tensors, *functions])
        parallel(kernel.address, args.ctypes.data, num_threads, 0)
        return out
