"""What this machine has, without torch."""

from __future__ import annotations

import os
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU that the NVIDIA driver lets this system see."""


def count_gpus() -> int:
    """NVIDIA GPUs that a process started here can use: those of CUDA_VISIBLE_DEVICES where it is set, up to the first that is
    none (https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars), else all of the driver's."""
    try:
        there = len(list(_DRIVER.iterdir()))
    except OSError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    names = [name.strip() for name in visible.split(",")]
    none = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return min(there, none)
