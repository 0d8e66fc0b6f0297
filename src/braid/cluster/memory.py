"""Settings of this process's memory allocator and garbage collector."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Numbers of mallopt(3)."""


def keep_freed_memory() -> bool:
    """Have the C library keep freed blocks for the next allocation. Returns whether it supports this (glibc
    only).

    By default it gives each block above 32 MiB back to the kernel, which has to zero the pages anew for every
    large activation: up to a fifth of a training step on CPU. The process stays as large as it once was.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # a C library without it, such as musl
        logger.debug("mallopt is not available: large blocks of memory are always returned to the kernel")
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


@contextmanager
def settled() -> Iterator[None]:
    """Within the block the garbage collector skips all objects that exist now: libraries, models, data.
    Scanning them takes 0.3 s, every few rounds and in the middle of one."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
