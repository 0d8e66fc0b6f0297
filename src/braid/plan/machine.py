"""Hardware of this machine, detected without torch."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pynvml


@cache
def cpu_info(field: str) -> str:
    """A field of Linux' /proc/cpuinfo, such as `vendor_id` or `flags`; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def memory_bytes() -> int:
    """Memory of this machine, or of its container (cgroup v2) if that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


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


def gpu_bytes() -> int | None:
    """Memory of the first NVIDIA GPU of this machine; None without one."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
