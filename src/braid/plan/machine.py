"""Hardware of this machine, detected without torch."""

from __future__ import annotations

import os

import pynvml


def count_gpus() -> int:
    """Number of NVIDIA GPUs available to a new process: those of CUDA_VISIBLE_DEVICES if it is set, up to the
    first invalid entry (https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars), else all
    that NVML lists; 0 without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        there = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    names = [name.strip() for name in visible.split(",")]
    none = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return min(there, none)
