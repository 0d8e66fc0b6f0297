"""Kernels for GPUs, written in Triton, which CUDA builds of PyTorch bring along. This file does not import
it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None
