"""Copies from host memory to a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: Tensor | NDArray | Sequence[int], device: torch.device) -> Tensor:
    """`values` on `device`, with their dtype. To a GPU from pinned memory: a copy from other memory would
    wait until the GPU has done all that was asked of it before."""
    tensor = torch.as_tensor(values)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
