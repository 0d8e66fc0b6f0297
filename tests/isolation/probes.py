"""Programs that try to change or watch what is outside of their sandbox.

FILE, FOLDER and VICTIM are a file, a folder and a process of the user who runs the sandbox, KEY that of a
System V queue; READABLE is a file that the sandbox shows. A probe prints `reached` if a call that it must not
make has succeeded; what it changed is compared outside. A program's process number may mean another process
inside.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, fcntl, os, platform, resource, signal, struct
L = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == 'x86_64'
def reached(value):
    if value >= 0: print('reached', flush=True)
def call(numbers, *args):
    return L.syscall(numbers[0] if x86 else numbers[1], *args)
"""

PROBES: dict[str, str] = {
    # ---- modes, owners, times, attributes
    "chmod": "os.chmod(FILE, 0o777)",
    "chmod of a folder": "os.chmod(FOLDER, 0o701)",
    "chmod with the set-user-id bit": "os.chmod(FILE, 0o4755)",
    "fchmodat": "L.fchmodat(-100, FILE.encode(), 0o777, 0)",
    "fchmodat2": "call((452, 452), -100, FILE.encode(), 0o777, 0)",
    "fchmod of a path descriptor": "os.chmod(f'/proc/self/fd/{os.open(FILE, os.O_PATH)}', 0o777)",
    "fchmod of a readable file": "fd = os.open(READABLE, os.O_RDONLY)\nos.fchmod(fd, os.fstat(fd).st_mode & 0o7777)\nreached(0)",
    "chown": "os.chown(FILE, -1, os.getgid())\nreached(0)",
    "lchown": "os.lchown(FILE, os.getuid(), -1)\nreached(0)",
    "fchown of a readable file": "os.fchown(os.open(READABLE, os.O_RDONLY), -1, os.getgid())\nreached(0)",
    "utime": "os.utime(FILE, (1, 1))",
    "utimes": "L.utimes(FILE.encode(), (ctypes.c_long * 4)(1, 0, 1, 0))",
    "utimensat": "call((280, 88), -100, FILE.encode(), (ctypes.c_long * 4)(1, 0, 1, 0), 0)",
    "futimesat": "x86 and call((261, 0), -100, FILE.encode(), (ctypes.c_long * 4)(1, 0, 1, 0))",
    "utime of a folder": "os.utime(FOLDER, (1, 1))",
    "setxattr": "os.setxattr(FILE, 'user.x', b'x')",
    "lsetxattr": "os.setxattr(FILE, 'user.x', b'x', follow_symlinks=False)",
    "setxattr of a folder": "os.setxattr(FOLDER, 'user.x', b'x')",
    "removexattr": "os.removexattr(FILE, 'user.there')",
    "file flags of a readable file": "fd = os.open(READABLE, os.O_RDONLY)\nflags = bytearray(8)\n"
    "L.ioctl(fd, ctypes.c_ulong(0x80086601), (ctypes.c_char * 8).from_buffer(flags))\n"
    "reached(L.ioctl(fd, ctypes.c_ulong(0x40086602), (ctypes.c_char * 8).from_buffer(flags)))",
    "a lease on a readable file": "fcntl.fcntl(os.open(READABLE, os.O_RDONLY), 1024, 0)\nreached(0)",
    # ---- watching
    "inotify of a file": "reached(L.inotify_add_watch(L.inotify_init1(0), FILE.encode(), 0xfff))",
    "inotify of a folder": "reached(L.inotify_add_watch(L.inotify_init1(0), FOLDER.encode(), 0xfff))",
    "inotify of a readable file": "reached(L.inotify_add_watch(L.inotify_init1(0), READABLE.encode(), 0xfff))",
    "a notice of a folder's changes": "fcntl.fcntl(os.open(os.path.dirname(READABLE), os.O_RDONLY), 1026, 2)\nreached(0)",
    # ---- other processes
    "prlimit": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (50, 50))",
    "prlimit of the CPU time": "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1000, 1000))",
    "reading another's limits": "reached(sum(resource.prlimit(VICTIM, resource.RLIMIT_NOFILE)) and 0)",
    "affinity": "os.sched_setaffinity(VICTIM, {min(os.sched_getaffinity(0))})",
    "priority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "priority of the group": "os.setpriority(os.PRIO_PGRP, VICTIM, 19)",
    "priority of the user": "call((141, 140), 2, os.getuid(), 19)",
    "scheduling policy": "os.sched_setscheduler(VICTIM, os.SCHED_BATCH, os.sched_param(0))",
    "scheduling attributes": "call((314, 274), VICTIM, struct.pack('IIQiIQQQ', 48, 3, 0, 19, 0, 0, 0, 0), 0)",
    "I/O priority": "call((251, 30), 1, VICTIM, 2 << 13 | 7)",
    "I/O priority of the user": "call((251, 30), 3, os.getuid(), 2 << 13 | 7)",
    "a signal": "os.kill(VICTIM, signal.SIGKILL)",
    "a signal to a thread": "call((200, 130), VICTIM, signal.SIGKILL)",
    "a signal with a value": "call((129, 138), VICTIM, signal.SIGKILL, struct.pack('iii116x', signal.SIGKILL, 0, -1))",
    "a signal by descriptor": "call((424, 424), call((434, 434), VICTIM, 0), signal.SIGKILL, 0, 0)",
    "out-of-memory score": "open(f'/proc/{VICTIM}/oom_score_adj', 'w').write('1000')",
    "memory of a process": "open(f'/proc/{VICTIM}/clear_refs', 'w').write('1')\nreached(0)",
    # ---- message queues
    "a POSIX message queue": "reached(L.mq_open(QUEUE, os.O_RDWR, 0o600, None))",
    "a new POSIX message queue": "L.mq_open(QUEUE + b'-new', os.O_RDWR | os.O_CREAT, 0o600, None)",
    "a removed POSIX message queue": "L.mq_unlink(QUEUE)",
    "a new System V queue": "L.msgget(KEY, 0o1600)",
}  # fmt: skip
OF_ALL_PROCESSES = ("priority of the user", "I/O priority of the user")
"""These would change all processes of the user who runs the tests: only to be run in a sandbox."""
