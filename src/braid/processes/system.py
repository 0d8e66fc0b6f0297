"""Processes of this machine, from /proc (Linux): their children, and how to kill them.

    python system.py PARENT COMMAND...

runs a command that is killed, with what it has started, when the process PARENT ends for any reason. Standard
library only, since it runs without any other import path.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

FOLDER = "BRAID_PROCESS_FOLDER"
"""Environment variable with a folder that is removed with the process."""
_LIMIT_S = 5.0
"""Time for killed processes to disappear."""
_TICK_S = 0.5
"""Interval at which a process without a handle of its parent looks whether it has ended."""


def stacks_on_signal(*, chain: bool = False) -> None:
    """From now on SIGUSR1 writes the stacks of this process's threads to its standard error, whatever they
    do. With `chain` the handler that there is follows."""
    if hasattr(signal, "SIGUSR1") and sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR1, sys.__stderr__, all_threads=True, chain=chain)


def children(pid: int) -> list[int]:
    """The children of `pid`; empty without /proc."""
    return [child for child, (_, parent, _) in _stats() if parent == pid]


def descendants(pid: int) -> list[int]:
    """The descendants of `pid` whose parents are alive. While some exit, others may be missing
    (proc_pid_children(5)). Does not read the files of other processes, of which there may be thousands."""
    pids = [pid]
    for one in pids:
        for file in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pids += map(int, file.read_text().split())
    return pids[1:]


def with_variable(name: str, value: str) -> list[int]:
    """The processes that were started with this environment variable."""
    pids: list[int] = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in file.read_bytes().split(b"\0"):
                pids.append(int(file.parent.name))
    return pids


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; False without /proc."""
    with contextlib.suppress(OSError):
        return bool(
            Path(f"/proc/{pid}/cmdline").read_bytes()
        )  # empty for one that has ended and waits for its parent
    return False


def kill(pids: Iterable[int]) -> None:
    """Kill those of the processes that still exist."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def kill_group(group: int) -> None:
    """Kill the group's processes and remove shared memory that only they used. The caller is killed last, if
    it belongs to the group."""
    this_pid, deadline = os.getpid(), time.monotonic() + _LIMIT_S
    is_in = os.getpgrp() == group
    is_known, memory = False, _shared_memory([this_pid]) if is_in else set[Path]()
    while time.monotonic() < deadline:
        members = [pid for pid, (state, _, leader) in _stats() if leader == group and state != "Z"]
        is_known = is_known or bool(members)
        left = [pid for pid in members if pid != this_pid]
        if not left:
            break
        memory |= _shared_memory(left)
        kill(left)
        time.sleep(0.01)
    if not is_known:  # no /proc, or no process is left
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    if memory:
        others = _shared_memory(pid for pid, _ in _stats() if pid != this_pid or not is_in)
        for file in memory - others:
            file.unlink(missing_ok=True)
    if is_in:
        kill([this_pid])


def guarded(command: Sequence[str]) -> list[str]:
    """The command, changed so that it does not outlive this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether this process's child has ended. Does not reap it: until then no other process gets its number,
    by which its group is killed."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread has reaped it
        return True


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, its group and all that it has started, and reap it; one that the kernel does not let
    go, as a call of a driver may, is left after _LIMIT_S. Idempotent."""
    if process.returncode is not None and Path(f"/proc/{process.pid}").exists():
        return  # another process has its number, which none gets while its group has members
    started = descendants(process.pid)
    kill_group(process.pid)
    kill(started)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LIMIT_S)


def how_it_ended(code: int | None) -> str:
    """An exit code in words; None of a process that was killed in vain."""
    if code is None:
        return "was killed, but has not ended"
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal.Signals(-code).name} ({signal.strsignal(-code)})"


def handle_of(pid: int) -> int | None:
    """A pidfd of the process; None where the system call does not exist (before Linux 5.3) or the filter of a
    container forbids it. Raises ProcessLookupError if there is no such process."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise


def end_this_process() -> None:
    """Kill this process, its descendants and its process group, after removing its FOLDER."""
    if folder := os.environ.get(FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    kill(descendants(os.getpid()))
    kill_group(os.getpgrp())


def end_with(parent: int) -> None:
    """`end_this_process` when its parent, with this process id, has ended."""

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            handle = handle_of(parent)
            while os.getppid() == parent:
                if handle is None:
                    time.sleep(_TICK_S)
                else:
                    select.select([handle], [], [])
        end_this_process()

    threading.Thread(target=watch, daemon=True).start()


def _shared_memory(pids: Iterable[int]) -> set[Path]:
    """The files in /dev/shm that these processes have mapped."""
    files: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            files |= {Path(line[line.index(_SHM) :]) for line in maps if _SHM in line}
    return {file for file in files if file.exists()}  # paths of removed files end in "(deleted)"


_SHM = "/dev/shm/"


def _stats() -> Iterator[tuple[int, tuple[str, int, int]]]:
    """(number, (state, parent, process group)) of each process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, group = stat.read_text().rpartition(")")[2].split()[:3]
            yield int(stat.parent.name), (state, int(parent), int(group))


def _main(parent: int, command: Sequence[str]) -> None:
    end_with(parent)
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
    with open(os.devnull, "r+b") as null:  # the command alone holds its standard streams
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
    code = process.wait()
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
