"""Products of float32 activations with packed weights on CPUs, compiled by Numba.

Weights are stored in panels of some vector registers' width, in the order in which they are read. While a panel is multiplied with
one tile of rows after another, the next one is fetched from memory: with few rows the time is that of reading the weights, with many
that of the processor's multiplications. The terms of a sum have a fixed order, so a row has the same bits in any batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import binding, ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from .calls import Calls, result_of

_intrinsic: Any = intrinsic
_I64, _FLOATS, _LANES = ir.IntType(64), ir.FloatType(), 16
_VECTORS = 4 if binding.get_host_cpu_features().get("avx512f") else 1
"""Of a panel: with the sums of a tile they fit the registers."""
_ROWS, _COLUMNS = 6, _LANES * _VECTORS
_LINE_BYTES = 64
_DEPTH = 256
"""Terms that are added one after another; more would lose precision."""


@_intrinsic
def _multiply(  # addresses and their strides
    _: Any,
    _num: Any,
    _x: Any,
    _x_stride: Any,
    _panel: Any,
    _depth: Any,
    _added: Any,
    _added_stride: Any,
    _out: Any,
    _out_stride: Any,
    _ahead: Any,
    _all: Any,
) -> Any:
    """out [num, columns] = x [num, depth] @ panel [depth, columns] + added [num, columns], all given as addresses, with strides
    in bytes, for 1 to _ROWS rows. Meanwhile fetches a line from `ahead` for each row of the panel, or if `all` as many as a row has."""

    def generate(context: Any, builder: Any, __: Any, args: Any) -> Any:
        end = builder.append_basic_block("end")
        switch = builder.switch(args[0], end)
        for num in range(1, _ROWS + 1):
            case = builder.append_basic_block(f"rows{num}")
            switch.add_case(_I64(num), case)
            builder.position_at_end(case)
            with builder.if_else(builder.trunc(args[10], ir.IntType(1))) as (then, otherwise):
                with then:
                    _tile(builder, num, _VECTORS, *args[1:10])
                with otherwise:
                    _tile(builder, num, 1, *args[1:10])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


def _tile(  # noqa: PLR0913  # as above
    builder: Any,
    num: int,
    num_lines: int,
    x: Any,
    x_stride: Any,
    panel: Any,
    depth: Any,
    added: Any,
    added_stride: Any,
    out: Any,
    out_stride: Any,
    ahead: Any,
) -> None:
    kind, byte, number = ir.VectorType(_FLOATS, _LANES), ir.IntType(8).as_pointer(), ir.IntType(32)

    def vectors(address: Any) -> list[Any]:
        start = builder.inttoptr(address, kind.as_pointer())
        return [builder.gep(start, [_I64(v)]) for v in range(_VECTORS)]

    def loaded(address: Any) -> list[Any]:
        return [_aligned(builder.load(at), 4) for at in vectors(address)]

    fetch_kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    fetch = cgutils.get_or_insert_function(builder.module, fetch_kind, "llvm.prefetch.p0i8")
    rows = [builder.add(x, builder.mul(x_stride, _I64(r))) for r in range(num)]
    sums = [[cgutils.alloca_once(builder, kind) for _ in range(_VECTORS)] for _ in rows]
    for of_row in sums:
        for total in of_row:
            builder.store(kind(None), total)
    with cgutils.for_range(builder, depth) as loop:
        weights = loaded(builder.add(panel, builder.mul(loop.index, _I64(4 * _COLUMNS))))
        start = builder.add(ahead, builder.mul(loop.index, _I64(_LINE_BYTES * num_lines)))
        for line in range(num_lines):
            at = builder.inttoptr(builder.add(start, _I64(_LINE_BYTES * line)), byte)
            builder.call(
                fetch, [at, number(0), number(2), number(1)]
            )  # to read, keep in the second cache, data
        for row, of_row in zip(rows, sums, strict=True):
            at = builder.add(row, builder.mul(loop.index, _I64(4)))
            factor = builder.load(builder.inttoptr(at, _FLOATS.as_pointer()))
            one = builder.insert_element(kind(ir.Undefined), factor, number(0))
            wide = builder.shuffle_vector(one, kind(ir.Undefined), ir.VectorType(number, _LANES)(None))
            for total, weight in zip(of_row, weights, strict=True):
                product = builder.fmul(wide, weight, flags=["contract"])
                builder.store(builder.fadd(product, builder.load(total), flags=["contract"]), total)
    for r, of_row in enumerate(sums):
        more = loaded(builder.add(added, builder.mul(added_stride, _I64(r))))
        places = vectors(builder.add(out, builder.mul(out_stride, _I64(r))))
        for total, of, at in zip(of_row, more, places, strict=True):
            _aligned(builder.store(builder.fadd(builder.load(total), of), at), 4)


def _aligned(instruction: Any, num_bytes: int) -> Any:
    instruction.align = num_bytes
    return instruction


@cfunc(types.void(types.voidptr), error_model="numpy", cache=True)
def _product(data: Any) -> None:
    """Arguments: rows, depth, panels; address and stride of x; addresses of panels and bias; address and stride of out."""
    args = carray(data, (11,), np.int64)
    num_rows, depth, x_stride, out_stride = args[0], args[1], args[4], args[8]
    num_threads, thread = result_of(args[9]), result_of(args[10])
    tiles, num_bytes = (num_rows + _ROWS - 1) // _ROWS, 4 * _COLUMNS * depth
    items = tiles * args[2]
    for item in range(items * thread // num_threads, items * (thread + 1) // num_threads):
        panel, tile = item // tiles, item % tiles
        row, columns, here = tile * _ROWS, 4 * _COLUMNS * panel, args[5] + num_bytes * panel
        takes_all = 1 if tiles < _VECTORS else 0
        ahead = here + num_bytes + (1 - takes_all) * (tile % _VECTORS) * _LINE_BYTES * depth
        x, out = args[3] + row * x_stride, args[7] + row * out_stride + columns
        rows, added, added_stride = min(num_rows - row, _ROWS), args[6] + columns, 0
        for start in range(0, depth, _DEPTH):
            num = min(depth - start, _DEPTH)
            _multiply(rows, x, x_stride, here, num, added, added_stride, out, out_stride, ahead, takes_all)
            x, here, added, added_stride = x + 4 * num, here + 4 * _COLUMNS * num, out, out_stride
            ahead += _LINE_BYTES * num * (_VECTORS if takes_all else 1)


class PackedProduct:
    """The product with linear layers of the same input as one."""

    def __init__(self, *modules: Any) -> None:
        """`modules` have a `weight` and a `bias`, which may be None."""
        self._modules = modules
        self._size, self._depth = sum(len(of.weight) for of in modules), modules[0].weight.shape[1]
        num = -(-self._size // _COLUMNS)
        self._panels = torch.zeros(num, self._depth, _COLUMNS)
        self._bias = torch.zeros(num * _COLUMNS)
        self.load()

    @torch.no_grad()
    def load(self) -> None:
        """Copy the modules' weights."""
        weight, padding = torch.cat([of.weight for of in self._modules]), len(self._bias) - self._size
        self._panels.copy_(F.pad(weight, (0, 0, 0, padding)).view(-1, _COLUMNS, self._depth).transpose(1, 2))
        if self._modules[0].bias is not None:
            self._bias[: self._size] = torch.cat([of.bias for of in self._modules])

    def __call__(self, x: Tensor, calls: Calls, name: str) -> Tensor:
        """[M, D] -> [M, N], the result `name` of `calls`. Rows may be apart."""
        out = calls.empty(name, len(x), len(self._bias))
        sizes = len(x), self._depth, len(self._panels)
        calls.run(_product, *sizes, x, 4 * x.stride(0), self._panels, self._bias, out, 4 * len(self._bias))
        return out[:, : self._size]
