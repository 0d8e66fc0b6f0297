"""Moving a model's tensors between its device and host memory. The parameters stay the same objects."""

from __future__ import annotations

import mmap
import sys
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from braid.errors import TrainingError

HOST = torch.device("cpu")
_EXACT_BYTES = 2**20
"""Size from which pinned memory is not left to PyTorch's allocator."""
_pinned_memory: dict[int, list[mmap.mmap]] = {}
"""Pinned memory of this process by size, in use or not."""


def move_weights(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to `device`; tied ones stay tied."""
    for tensor in chain(module.parameters(), module.buffers()):
        tensor.data = moved(tensor.data, device)


def move_states(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move moments and step counts to `device`."""
    for states in optimizer.state.values():
        for name, tensor in states.items():
            states[name] = moved(tensor, device)


def release_memory() -> None:
    """Return memory that PyTorch's allocator keeps to the device, where engines in other processes need
    it."""
    torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch's allocator found no memory: a class of its own on GPUs, a text on CPUs
    (c10/core/impl/alloc_cpu.cpp)."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def num_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Size of the moments and step counts in bytes; 0 without an optimizer."""
    states = optimizer.state.values() if optimizer is not None else ()
    return sum(tensor.nbytes for moments in states for tensor in moments.values())


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; of a DTensor, this rank's part. Copies from CUDA to the host use pinned
    memory, which is several times faster."""
    if isinstance(tensor, DTensor):  # whose own operations move to its mesh's device
        return DTensor(moved(tensor.to_local(), device), tensor._spec, requires_grad=False)
    if device == HOST and tensor.is_cuda:
        return pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return tensor.to(device)


def pinned(num_bytes: int) -> Tensor:
    """Uninitialized pinned host memory, uint8 [num_bytes].

    PyTorch's allocator rounds up to a power of two, so large memory is pinned here. It is kept and reused
    once no tensor refers to it, since pinning takes longer than copying."""
    if num_bytes < _EXACT_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    of_size = _pinned_memory.setdefault(num_bytes, [])
    for index in range(len(of_size)):
        if sys.getrefcount(of_size[index]) <= 2:  # those of the list and of getrefcount
            return torch.frombuffer(of_size[index], dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    cuda: Any = torch.cuda.cudart()
    if error := int(cuda.cudaHostRegister(tensor.data_ptr(), num_bytes, 0)):
        raise TrainingError(
            f"cannot pin {num_bytes} bytes of host memory for train.offload (CUDA error {error}); turn it "
            "off, or raise the limit of locked memory"
        )
    of_size.append(memory)
    return tensor
