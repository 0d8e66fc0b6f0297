"""What a worker has started ends with it, and the worker with its parent process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.leftovers import await_end

CHILDREN = """
import os, subprocess, tempfile, time
from braid.cluster import watchdog
watchdog.start(ends_raylet=True)
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
tempfile.mkdtemp(prefix=watchdog.folder_prefix(os.getpid()))
if os.fork():
    print("up", flush=True)
time.sleep(600)
"""
"""A worker with a folder, a child in its own group, one in another session, and one without an exec."""
PARENT = """
import subprocess, sys, time
subprocess.Popen(["sleep", "600"])  # an agent
subprocess.Popen([sys.executable, "-c", sys.argv[1]]).wait()
time.sleep(600)  # like a raylet, it outlives its worker
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[psutil.Popen]:
    command = [sys.executable, "-c", PARENT, CHILDREN]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with psutil.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


@pytest.mark.parametrize("killed", ["worker", "parent"])
def test_nothing_outlives_a_worker_or_its_parent_that_is_killed(
    killed: str, parent: psutil.Popen, tmp_path: Path
) -> None:
    agent, worker = parent.children()
    children = worker.children(recursive=True)
    assert len(children) == 3
    assert len(list(tmp_path.iterdir())) == 1
    (worker if killed == "worker" else parent).kill()
    await_end([worker, *children, *([agent] if killed == "parent" else [])])
    if killed == "worker":
        assert agent.is_running()
        agent.kill()
    await_end([process for process in psutil.process_iter() if _is_watchdog(process, worker.pid)])
    assert not list(tmp_path.iterdir())


def _is_watchdog(process: psutil.Process, worker: int) -> bool:
    try:
        return process.cmdline()[1:4] == ["-m", "braid.cluster.watchdog", str(worker)]
    except psutil.Error:
        return False
