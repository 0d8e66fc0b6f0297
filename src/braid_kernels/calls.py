"""Calls of functions that Numba has compiled: what such functions need, and calls at once or recorded.

Threads are those of PyTorch: a second pool would compete with it for the cores.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from .machine_code import c_function

_intrinsic: Any = intrinsic


def _pointer_to(kind: types.Type) -> Any:
    @_intrinsic
    def pointer(_: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


floats_at, ints_at = _pointer_to(types.float32), _pointer_to(types.int64)


@_intrinsic
def result_of(_: Any, _address: Any) -> Any:
    """The result of the C function `int f(void)` at an address."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(args[0], function), []), ir.IntType(64))

    return types.int64(types.int64), generate


@cache
def openmp() -> tuple[Any, list[int]]:
    """GOMP_parallel of the OpenMP library that PyTorch uses, and the addresses of omp_get_num_threads,
    omp_get_thread_num and GOMP_barrier. Raises AttributeError or OSError if PyTorch uses another one."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    functions = library.omp_get_num_threads, library.omp_get_thread_num, library.GOMP_barrier
    return parallel, [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]


@_intrinsic
def _run(_: Any, _function: Any, _data: Any) -> Any:
    """Run the C function of one address at an address."""

    def generate(context: Any, builder: Any, __: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@c_function()
def _run_in_order(data: Any) -> None:
    """Each call begins when all threads have ended the last. Arguments: addresses of pairs (function,
    argument) and of GOMP_barrier; number of pairs."""
    args = carray(data, (3,), np.int64)
    pairs = carray(ints_at(args[0]), (args[2], 2))
    for i in range(args[2]):
        _run(pairs[i, 0], pairs[i, 1])
        result_of(args[1])


class Calls:
    """Calls of compiled functions, which are run at once, on PyTorch's threads. Their results are new
    tensors."""

    def empty(self, name: str, *shape: int) -> Tensor:  # noqa: ARG002  # see Recording
        """A float32 tensor for the result `name`."""
        return torch.empty(shape)

    def run(self, function: Any, *args: int | Tensor | NDArray[Any] | ctypes.Array[Any] | None) -> None:
        """Run a C function of one address, that of `args` (numbers, and the addresses of arrays, 0 for None)
        and of two functions: number of threads, this thread."""
        parallel, functions = openmp()
        arguments = integers([*map(_number, args), *functions[:2]])
        parallel(function.address, ctypes.addressof(arguments), torch.get_num_threads(), 0)


class Recording(Calls):
    """Calls that `replay` runs in order, without the time that Python takes for each. Results are in
    `memory`, which recordings share; a result overwrites the last one of the same name."""

    def __init__(self, memory: dict[str, Tensor]) -> None:
        self._memory, self._kept, self._pairs = memory, list[Any](), list[int]()

    def empty(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = torch.empty(size)
        return self._memory[name][:size].view(shape)

    def run(self, function: Any, *args: int | Tensor | NDArray[Any] | ctypes.Array[Any] | None) -> None:
        arguments = integers([*map(_number, args), *openmp()[1][:2]])
        self._pairs += [function.address, ctypes.addressof(arguments)]
        self._kept += [arguments, *args]

    def replay(self) -> None:
        """With as many threads as PyTorch had when the calls were recorded."""
        Calls().run(_run_in_order, integers(self._pairs), openmp()[1][2], len(self._pairs) // 2)


def _number(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    return ctypes.addressof(argument) if isinstance(argument, ctypes.Array) else argument or 0


def integers(numbers: Sequence[int]) -> ctypes.Array[Any]:
    return (ctypes.c_int64 * len(numbers))(*numbers)
