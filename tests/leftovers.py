"""Tests of processes must leave nothing behind.

`nothing_is_left` is used by every test in tests/faults, tests/cluster and tests/weights, and by all with
workers or vLLM.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import gettempdir

import psutil
import pytest

LIMIT_S = 180.0
"""Limit for anything that a test waits for. Only failures reach it; a loaded machine can be a hundred times
slower than an idle one."""


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No process, shared memory, engine's folder, listening port or Ray cluster of a test outlives it. A
    cluster that was there before, of the whole module, may have idle workers."""
    processes, files, ports, is_connected = _children(), _files(), _ports(), _is_connected()
    yield
    assert _is_connected() <= is_connected, "the test left a Ray cluster"
    _await_none(
        lambda: [p for p in _children() - processes if runs(p) and not _is_kept(p, is_connected=is_connected)]
    )
    _await_none(lambda: [file for file in _files() - files if _is_unowned(file)])
    if not is_connected and _ports() - ports:
        gc.collect()  # an error's traceback may still hold what listens
        _await_none(lambda: _ports() - ports)


def error_output(child: subprocess.Popen[str]) -> str:
    """What a child writes to its piped stderr until it ends. One that hangs is ended: it was started with
    `-X faulthandler`, and the failure shows the stacks of its threads."""
    try:
        return child.communicate(timeout=LIMIT_S)[1]
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)
        raise AssertionError(f"hung:\n{child.communicate()[1]}") from None


def await_end(processes: Iterable[psutil.Process]) -> None:
    """Fails with the names of those that still run after the limit."""
    _await_none(lambda: [process for process in processes if runs(process)])


def runs(process: psutil.Process) -> bool:
    """One that nobody has waited for has ended too."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _await_none(left: Callable[[], Iterable[object]]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while still := list(left()):
        assert time.monotonic() < deadline, f"still there: {still}"
        time.sleep(0.05)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _is_kept(process: psutil.Process, *, is_connected: bool) -> bool:
    """A helper of Python's own, which ends with this process; with a cluster, a process that Ray keeps ready
    for work."""
    try:
        command = process.cmdline()
    except psutil.Error:
        return True
    if any(
        "multiprocessing.resource_tracker" in part or "multiprocessing.forkserver" in part for part in command
    ):
        return True
    return is_connected and (
        command[:1] == ["ray::IDLE"] or any("default_worker.py" in part for part in command)
    )


def _files() -> set[Path]:
    """Shared memory and temporary files, braid's own and vLLM's."""
    memory, temporary = Path("/dev/shm"), Path(gettempdir())
    return {
        *(file for name in ("braid-*", "psm_*") for file in memory.glob(name)),
        *(file for name in ("braid_engine_*", "vllm_dist_*") for file in temporary.glob(name)),
    }


def _is_unowned(file: Path) -> bool:
    """Whether the process that made it is gone, or does not hold it; files of runs beside this one are locked
    or mapped."""
    if file.is_dir():
        return not psutil.pid_exists(int(file.name.split("_")[2]))
    if file.name.startswith("psm_"):
        return not any(str(file) in maps for maps in _maps())
    try:
        number = os.open(file, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(number)


def _maps() -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            yield maps.read_text()


def _ports() -> set[int]:
    """Ports on which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
