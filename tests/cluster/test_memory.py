"""Freed memory is kept where the C library lets it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, torch
from braid.cluster.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.ones(1)
default = faults()
assert keep_freed_memory()
faults(), faults()  # the heap grows until a block fits at its alignment
print(default, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_fewer_pages_are_asked_from_the_kernel_again() -> None:
    # In a process of its own: the setting is for good. How many fewer hangs on where the heap can grow; some
    # always are.
    done = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True)
    default, kept = map(int, done.stdout.split())
    assert kept < default
