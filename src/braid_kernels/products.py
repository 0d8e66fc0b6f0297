"""Products of float32 activations with packed weights, and gradients of weights, on CPUs, compiled by Numba.

Weights are stored in panels of some vector registers' width, in the order in which they are read. While a
panel is multiplied with one tile of rows after another, the next one is fetched from memory: with few rows
the time is that of reading the weights, with many that of the processor's multiplications. The terms of a sum
have a fixed order, so a row has the same bits in any batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from braid.models.lora import merged_weight

from .calls import Calls, floats_at, result_of
from .machine_code import c_function
from .vectors import HAS_AVX512, LANES, LINE_BYTES, tile_product

_VECTORS = 4 if HAS_AVX512 else 1
_ROWS, _COLUMNS = 6, LANES * _VECTORS  # the sums of a tile fit the registers
_DEPTH = 256
"""Terms that are added one after another; more would lose precision."""
_multiply = tile_product(_VECTORS, _ROWS, (1, _VECTORS))


@c_function()
def _product(data: Any) -> None:
    """Arguments: rows, depth, panels; address and stride of x; addresses of panels and bias; address and
    stride of out."""
    args = carray(data, (11,), np.int64)
    num_rows, depth, x_stride, out_stride = args[0], args[1], args[4], args[8]
    num_threads, thread = result_of(args[9]), result_of(args[10])
    tiles, num_bytes = (num_rows + _ROWS - 1) // _ROWS, 4 * _COLUMNS * depth
    items = tiles * args[2]
    for item in range(items * thread // num_threads, items * (thread + 1) // num_threads):
        panel, tile = item // tiles, item % tiles
        row, columns, here = tile * _ROWS, 4 * _COLUMNS * panel, args[5] + num_bytes * panel
        takes_all = 1 if tiles < _VECTORS else 0
        ahead = here + num_bytes + (1 - takes_all) * (tile % _VECTORS) * LINE_BYTES * depth
        x, out = args[3] + row * x_stride, args[7] + row * out_stride + columns
        rows, added, added_stride = min(num_rows - row, _ROWS), args[6] + columns, 0
        for start in range(0, depth, _DEPTH):
            num = min(depth - start, _DEPTH)
            _multiply(
                rows,
                x,
                x_stride,
                4,
                here,
                4 * _COLUMNS,
                num,
                added,
                added_stride,
                out,
                out_stride,
                ahead,
                takes_all,
            )
            x, here, added, added_stride = x + 4 * num, here + 4 * _COLUMNS * num, out, out_stride
            ahead += LINE_BYTES * num * (_VECTORS if takes_all else 1)


_add = tile_product(_VECTORS, _ROWS)
_TILES = 32
"""Tiles that are copied together; with one panel of the other factor they fit the second cache."""


@c_function()
def _weight_gradient(data: Any) -> None:
    """Arguments: tokens, columns of the gradient, columns of x (a multiple of _COLUMNS); addresses of the
    gradient, x, zeros, out and scratch."""
    args = carray(data, (10,), np.int64)
    num_tokens, num, size = args[0], args[1], args[2]
    num_threads, thread = result_of(args[8]), result_of(args[9])
    grad = carray(floats_at(args[3]), (num_tokens, num))
    scratch = args[7] + 4 * _TILES * _ROWS * _DEPTH * thread
    packed = carray(floats_at(scratch), (_TILES * _DEPTH, _ROWS))
    tiles = (num + _ROWS - 1) // _ROWS
    first, last = tiles * thread // num_threads, tiles * (thread + 1) // num_threads
    for token in range(0, num_tokens, _DEPTH):
        depth = min(num_tokens - token, _DEPTH)
        for block in range(first, last, _TILES):
            end = min(block + _TILES, last)
            for tile in range(block, end):
                to, column = (tile - block) * _DEPTH, tile * _ROWS
                if column + _ROWS <= num:
                    for i in range(depth):
                        for j in range(_ROWS):  # a constant number of times
                            packed[to + i, j] = grad[token + i, column + j]
                else:
                    for i in range(depth):
                        for j in range(num - column):
                            packed[to + i, j] = grad[token + i, column + j]
            for column in range(0, size, _COLUMNS):
                panel = args[4] + 4 * (token * size + column)
                for tile in range(block, end):
                    rows, out = min(num - tile * _ROWS, _ROWS), args[6] + 4 * (tile * _ROWS * size + column)
                    added, stride = (out, 4 * size) if token else (args[5], 0)
                    x = scratch + 4 * _ROWS * _DEPTH * (tile - block)
                    _add(rows, x, 4, 4 * _ROWS, panel, 4 * size, depth, added, stride, out, 4 * size, 0, 0)


def fits_panels(num_columns: int) -> bool:
    return num_columns % _COLUMNS == 0


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x: [T, N], [T, D] -> [N, D], the sum over tokens in their order, for a D that
    `fits_panels`."""
    out, num_threads = x.new_empty(grad.shape[1], x.shape[1]), torch.get_num_threads()
    zeros, scratch = x.new_zeros(_COLUMNS), x.new_empty(num_threads, _TILES * _ROWS * _DEPTH)
    sizes = *grad.shape, x.shape[1]
    Calls().run(_weight_gradient, *sizes, grad.contiguous(), x.contiguous(), zeros, out, scratch)
    return out


class PackedProduct:
    """The product with linear layers of the same input as one."""

    def __init__(self, *modules: Any) -> None:
        """`modules` have a `weight` and a `bias`, which may be None, and may have adapters (models.lora)."""
        self._modules = modules
        self._size, self._depth = sum(len(module.weight) for module in modules), modules[0].weight.shape[1]
        num = -(-self._size // _COLUMNS)
        self._panels = torch.zeros(num, self._depth, _COLUMNS)
        self._bias = torch.zeros(num * _COLUMNS)
        self.load()

    @torch.no_grad()
    def load(self) -> None:
        """Copy the modules' weights, with adapters merged."""
        weight = torch.cat([merged_weight(module) for module in self._modules])
        padding = len(self._bias) - self._size
        self._panels.copy_(F.pad(weight, (0, 0, 0, padding)).view(-1, _COLUMNS, self._depth).transpose(1, 2))
        if self._modules[0].bias is not None:
            self._bias[: self._size] = torch.cat([module.bias for module in self._modules])

    def __call__(self, x: Tensor, calls: Calls, name: str) -> Tensor:
        """[M, D] -> [M, N], the result `name` of `calls`. Rows may be apart."""
        out = calls.empty(name, len(x), len(self._bias))
        sizes = len(x), self._depth, len(self._panels)
        calls.run(_product, *sizes, x, 4 * x.stride(0), self._panels, self._bias, out, 4 * len(self._bias))
        return out[:, : self._size]
