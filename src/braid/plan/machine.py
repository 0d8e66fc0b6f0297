"""Hardware of this machine, detected without torch."""

from __future__ import annotations

import os
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Contains a folder for each GPU that the NVIDIA driver exposes to this system."""


def count_gpus() -> int:
    """Number of NVIDIA GPUs available to a new process: those of CUDA_VISIBLE_DEVICES if it is set, up to the
    first invalid entry (https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars), else all
    GPUs of the driver."""
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
