"""Parts of compiled kernels that Numba's own code does not reach: products of tiles with all sums in vector
registers, and an exponential that is computed in vectors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
LINE_BYTES = 64
HAS_AVX512: bool = binding.get_host_cpu_features().get("avx512f", False)
ORDERED = {"contract", "reassoc", "nsz", "arcp"}
"""Operations may be fused and reordered, but NaN stays NaN."""
_intrinsic: Any = intrinsic
_FLOAT = np.float32
_I64, _I32, _FLOATS = ir.IntType(64), ir.IntType(32), ir.FloatType()


@_intrinsic
def _power_of_two(_: Any, _exponent: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        bits = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.add(args[0], bits(127)), bits(23)), ir.FloatType())

    return types.float32(types.int32), generate


@njit(fastmath=ORDERED)
def exp(x: Any) -> Any:
    """exp(x) for x <= 0 within 2 ulp, by the polynomial of Cephes, since a call of libm cannot be
    vectorised."""
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


@cache
def tile_product(vectors: int, most_rows: int, num_fetched: tuple[int, ...] = (0,)) -> Any:
    """A function for compiled code: out [rows, columns] = x [rows, depth] @ panel [depth, columns] + added
    [rows, columns], for 1 to `most_rows` rows and 16 columns for each of `vectors`. All are addresses of
    float32, with strides of rows in bytes; `x_step` is that of x's columns. The sums are in `vectors` x
    `most_rows` registers, and their terms in order. Meanwhile fetches lines of 64 bytes that begin at
    `ahead`: num_fetched[mode] for each row of the panel."""

    def signature(  # addresses and their strides
        _: Any, _rows: Any, _x: Any, _x_stride: Any, _x_step: Any, _panel: Any, _panel_stride: Any,
        _depth: Any, _added: Any, _added_stride: Any, _out: Any, _out_stride: Any, _ahead: Any, _mode: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, __: Any, args: Any) -> Any:
            end = builder.append_basic_block("end")
            case_of = builder.add(builder.mul(args[12], _I64(most_rows + 1)), args[0])
            switch = builder.switch(case_of, end)
            for mode, lines in enumerate(num_fetched):
                for num in range(1, most_rows + 1):
                    case = builder.append_basic_block(f"rows{num}")
                    switch.add_case(_I64(mode * (most_rows + 1) + num), case)
                    builder.position_at_end(case)
                    _tile(builder, vectors, num, lines, *args[1:12])
                    builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 13), generate

    return _intrinsic(signature)


def _tile(  # noqa: PLR0913  # as above
    builder: Any, num_vectors: int, num: int, num_lines: int, x: Any, x_stride: Any, x_step: Any,
    panel: Any, panel_stride: Any, depth: Any, added: Any, added_stride: Any, out: Any,
    out_stride: Any, ahead: Any,
) -> None:  # fmt: skip
    kind, byte = ir.VectorType(_FLOATS, LANES), ir.IntType(8).as_pointer()

    def vectors(address: Any) -> list[Any]:
        start = builder.inttoptr(address, kind.as_pointer())
        return [builder.gep(start, [_I64(v)]) for v in range(num_vectors)]

    def loaded(address: Any) -> list[Any]:
        return [_aligned(builder.load(at)) for at in vectors(address)]

    fetch_kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(builder.module, fetch_kind, "llvm.prefetch.p0i8")
    rows = [builder.add(x, builder.mul(x_stride, _I64(r))) for r in range(num)]
    sums = [[cgutils.alloca_once(builder, kind) for _ in range(num_vectors)] for _ in rows]
    for of_row in sums:
        for total in of_row:
            builder.store(kind(None), total)
    with cgutils.for_range(builder, depth) as loop:
        weights = loaded(builder.add(panel, builder.mul(loop.index, panel_stride)))
        start = builder.add(ahead, builder.mul(loop.index, _I64(LINE_BYTES * num_lines)))
        for line in range(num_lines):
            at = builder.inttoptr(builder.add(start, _I64(LINE_BYTES * line)), byte)
            builder.call(fetch, [at, _I32(0), _I32(2), _I32(1)])  # to read, keep in the second cache, data
        for row, of_row in zip(rows, sums, strict=True):
            at = builder.add(row, builder.mul(loop.index, x_step))
            factor = builder.load(builder.inttoptr(at, _FLOATS.as_pointer()))
            one = builder.insert_element(kind(ir.Undefined), factor, _I32(0))
            wide = builder.shuffle_vector(one, kind(ir.Undefined), ir.VectorType(_I32, LANES)(None))
            for total, weight in zip(of_row, weights, strict=True):
                product = builder.fmul(wide, weight, flags=["contract"])
                builder.store(builder.fadd(product, builder.load(total), flags=["contract"]), total)
    for r, of_row in enumerate(sums):
        more = loaded(builder.add(added, builder.mul(added_stride, _I64(r))))
        places = vectors(builder.add(out, builder.mul(out_stride, _I64(r))))
        for total, start_value, at in zip(of_row, more, places, strict=True):
            _aligned(builder.store(builder.fadd(builder.load(total), start_value), at))


def _aligned(instruction: Any) -> Any:
    instruction.align = 4
    return instruction
