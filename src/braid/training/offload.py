"""Moving a model's tensors between its device and host memory. The parameters stay the same objects."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")


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
    """Return memory that PyTorch's allocator keeps to the device, where engines in other processes need it."""
    torch.cuda.empty_cache()


def num_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Size of the moments and step counts in bytes; 0 without an optimizer."""
    states = optimizer.state.values() if optimizer is not None else ()
    return sum(tensor.nbytes for of in states for tensor in of.values())


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`. Copies from CUDA to the host use pinned memory, which is several times
    faster."""
    if device == HOST and tensor.is_cuda:
        return torch.empty_like(tensor, device=HOST, pin_memory=True).copy_(tensor)
    return tensor.to(device)
