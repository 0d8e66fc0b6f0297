"""A seccomp filter for bubblewrap. It denies system calls that reward programs never need and that access
other processes, allocate memory outside the limits, or widen the kernel's attack surface; they fail with
EPERM."""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBERS = {
    "x86_64": (
        0xC000003E,
        {
            *(101, 310, 311, 312),  # ptrace, process_vm_readv, process_vm_writev, kcmp
            *(155, 161, 165, 166, 272, 308, 428, 429, 430, 442),  # pivot_root, chroot, mounts, unshare, setns
            *(319, 447, 29, 64, 68),  # memfd_create, memfd_secret, shmget, semget, msgget
            *(248, 249, 250),  # keyrings
            # perf_event_open, file handles, bpf, userfaultfd, io_uring_setup
            *(298, 303, 304, 321, 323, 425),
        },
        56,
        435,
    ),
    "aarch64": (
        0xC00000B7,
        {
            *(117, 270, 271, 272),
            *(41, 51, 40, 39, 97, 268, 428, 429, 430, 442),
            *(279, 447, 194, 190, 186),
            *(217, 218, 219),
            *(241, 264, 265, 280, 282, 425),
        },
        220,
        435,
    ),
}
"""Per architecture: AUDIT_ARCH, denied calls, and the numbers of clone and clone3 (asm/unistd.h)."""
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW* flags of clone(2). The arguments of clone3 are in memory, which a filter cannot read."""
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


@contextmanager
def program() -> Iterator[int | None]:
    """Yield a file descriptor with the filter in the format of seccomp(2); None on an unknown
    architecture."""
    if platform.machine() not in _NUMBERS:
        yield None
        return
    reading, writing = os.pipe()
    try:
        os.write(writing, b"".join(_instructions(*_NUMBERS[platform.machine()])))
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


def _instructions(arch: int, denied: set[int], clone: int, clone3: int) -> Iterator[bytes]:
    yield _step(_LOAD, 4)  # seccomp_data.arch
    yield _step(_EQUAL, arch, 1, 0)
    yield _step(_RETURN, _KILL)
    yield _step(_LOAD, 0)  # .nr
    yield _step(_AT_LEAST, _X32, 0, 1)
    yield _step(_RETURN, _FAIL | errno.EPERM)
    for number in sorted(denied):
        yield _step(_EQUAL, number, 0, 1)
        yield _step(_RETURN, _FAIL | errno.EPERM)
    yield _step(_EQUAL, clone3, 0, 1)
    yield _step(_RETURN, _FAIL | errno.ENOSYS)  # the C library then uses clone
    yield _step(_EQUAL, clone, 0, 3)
    yield _step(_LOAD, 16)  # .args[0]: the flags
    yield _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1)
    yield _step(_RETURN, _FAIL | errno.EPERM)
    yield _step(_RETURN, _ALLOW)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
