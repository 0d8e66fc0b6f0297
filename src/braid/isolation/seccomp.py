"""Seccomp filters. They deny system calls that a model's programs never need and that access other processes,
allocate memory outside the limits, or widen the kernel's attack surface; they fail with EPERM.

Without namespaces (`outside`) they also deny what Landlock does not govern: calls that change the mode,
owner, times or attributes of any file of the user, or limits, priority and affinity of the user's other
processes."""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager

Rules = dict[int, tuple[int, tuple[int, ...], bool]]
"""Per call: the number of an argument, values of its lower 32 bits, and whether only these values are allowed
or only they are denied."""

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
            *(253, 294, 300),  # inotify_init, inotify_init1, fanotify_init
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
            *(26, 262),
        },
        220,
        435,
    ),
}
"""Per architecture: AUDIT_ARCH, denied calls, and the numbers of clone and clone3 (asm/unistd.h)."""
_OUTSIDE = {
    "x86_64": {
        *(
            90,
            91,
            268,
            452,
            92,
            93,
            94,
            260,
        ),  # chmod, fchmod, fchmodat, fchmodat2; chown, fchown, lchown, fchownat
        *(132, 235, 261, 280),  # utime, utimes, futimesat, utimensat
        *(188, 189, 190, 463, 197, 198, 199, 466, 469),  # setxattr and removexattr families, file_setattr
        *(
            141,
            142,
            144,
            314,
            251,
        ),  # setpriority, sched_setparam, sched_setscheduler, sched_setattr, ioprio_set
        *(240, 241),  # mq_open, mq_unlink
        *(
            256,
            279,
            424,
            434,
            438,
            440,
            448,
        ),  # migrate_pages, move_pages, pidfds, process_madvise, process_mrelease
    },
    "aarch64": {
        *(52, 53, 452, 54, 55),
        88,
        *(5, 6, 7, 463, 14, 15, 16, 466, 469),
        *(140, 118, 119, 274, 30),
        *(180, 181),
        *(238, 239, 424, 434, 438, 440, 448),
    },
}
"""Calls that reach outside of a sandbox without namespaces. A program cannot change modes and times in its
own folder either: a filter does not see paths."""
_OF_OTHERS = {"x86_64": (302, 203), "aarch64": (261, 122)}
"""prlimit64 and sched_setaffinity: denied for another process than the caller, which is 0."""
_IOCTLS = (1, (0x40086602, 0x401C5820, 0x5412), False)
"""FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, TIOCSTI."""
_FCNTLS = (1, (1024, 1026), False)
"""F_SETLEASE, F_NOTIFY."""
_REQUESTS: dict[str, Rules] = {"x86_64": {16: _IOCTLS, 72: _FCNTLS}, "aarch64": {29: _IOCTLS, 25: _FCNTLS}}
"""Requests of ioctl and fcntl that act on a file that may only be read."""
_SIGNALS = {"x86_64": (62, 200, 234, 129, 297), "aarch64": (129, 130, 131, 138, 240)}
"""kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo."""
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW* flags of clone(2). The arguments of clone3 are in memory, which a filter cannot read."""
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000


@contextmanager
def program() -> Iterator[int | None]:
    """Yield a file descriptor with the filter in the format of seccomp(2); None on an unknown
    architecture."""
    machine = platform.machine()
    if machine not in _NUMBERS:
        yield None
        return
    reading, writing = os.pipe()
    try:
        os.write(writing, b"".join(_instructions(*_NUMBERS[machine], _REQUESTS[machine])))
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


def outside(protected: Collection[int]) -> bytes | None:
    """The filter for a program without namespaces, which may not send signals to the `protected` processes,
    their groups or all processes; None on an unknown architecture."""
    machine = platform.machine()
    if machine not in _NUMBERS:
        return None
    arch, denied, clone, clone3 = _NUMBERS[machine]
    rules: Rules = dict.fromkeys(_OF_OTHERS[machine], (0, (0,), True))
    targets = (-1, *protected, *(-pid for pid in protected))
    rules |= dict.fromkeys(_SIGNALS[machine], (0, targets, False))
    rules |= _REQUESTS[machine]
    return b"".join(_instructions(arch, denied | _OUTSIDE[machine], clone, clone3, rules))


def _instructions(arch: int, denied: set[int], clone: int, clone3: int, rules: Rules) -> Iterator[bytes]:
    yield _step(_LOAD, 4)  # seccomp_data.arch
    yield _step(_EQUAL, arch, 1, 0)
    yield _step(_RETURN, _KILL)
    yield _step(_LOAD, 0)  # .nr
    yield _step(_AT_LEAST, _X32, 0, 1)
    yield _step(_RETURN, _FAIL | errno.EPERM)
    for number in sorted(denied):
        yield _step(_EQUAL, number, 0, 1)
        yield _step(_RETURN, _FAIL | errno.EPERM)
    for number, (argument, values, are_allowed) in rules.items():
        for_equal, otherwise = (_ALLOW, _FAIL | errno.EPERM) if are_allowed else (_FAIL | errno.EPERM, _ALLOW)
        yield _step(_EQUAL, number, 0, 2 + 2 * len(values))
        yield _step(_LOAD, 16 + 8 * argument)
        for value in values:
            yield _step(_EQUAL, value & 0xFFFFFFFF, 0, 1)
            yield _step(_RETURN, for_equal)
        yield _step(_RETURN, otherwise)
    yield _step(_EQUAL, clone3, 0, 1)
    yield _step(_RETURN, _FAIL | errno.ENOSYS)  # the C library then uses clone
    yield _step(_EQUAL, clone, 0, 3)
    yield _step(_LOAD, 16)  # .args[0]: the flags
    yield _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1)
    yield _step(_RETURN, _FAIL | errno.EPERM)
    yield _step(_RETURN, _ALLOW)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
