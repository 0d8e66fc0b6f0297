"""A process beside each worker that ends what the worker leaves behind, however the worker has ended.

    python -m braid.cluster.watchdog WORKER RAYLET MARK AGENT...    # process ids

Ray starts a worker as a child of its raylet, and the raylet of a cluster that a driver has started ends with
that driver. The watchdog waits until worker or raylet is gone. Then it kills the worker and all that the
worker has started, removes its engines' temporary folders, and, if the raylet is gone, kills the raylet's
agents, which would remain for a minute.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from braid.processes import children, kill_group, with_variable

_MARK = "BRAID_WORKER"
"""Environment variable by which the processes that a worker has started are found."""


def folder_prefix(worker: int) -> str:
    """Prefix of the names of temporary folders that are removed with a worker, given its process id."""
    return f"braid_engine_{worker}_"


def start(*, ends_raylet: bool) -> None:
    """Start the watchdog of this process. With `ends_raylet` the raylet's agents end with the raylet."""
    this_pid, raylet, mark = os.getpid(), os.getppid(), secrets.token_hex(16)
    agents = [pid for pid in children(raylet) if pid != this_pid] if ends_raylet else []
    with suppress(PermissionError):  # the leader of a session leads its group already
        os.setpgid(0, 0)
    ids = map(str, (this_pid, raylet, mark, *agents))
    subprocess.run([sys.executable, "-m", __name__, *ids], check=True, start_new_session=True)
    os.environ[_MARK] = mark


def main(worker: int, raylet: int, mark: str, agents: Sequence[int]) -> None:
    """Open handles, which stay valid if a process id is reused, and watch in the background."""
    handles = [os.pidfd_open(pid) for pid in (worker, raylet)]
    beside = []
    for pid in agents:
        with suppress(ProcessLookupError):
            beside.append(os.pidfd_open(pid))
    if os.fork():  # Ray kills the children of a worker with it, and this process has to outlive it
        os._exit(0)
    gone, _, _ = select.select(handles, [], [])
    for handle in [handles[0], *(beside if handles[1] in gone else [])]:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    _clean_up(worker, mark)


def _clean_up(worker: int, mark: str) -> None:
    """Kill the process groups of the worker and of all that carry the mark, until none is left, and remove
    the worker's folders."""
    kill_group(worker)
    while left := with_variable(_MARK, mark):
        for pid in left:
            with suppress(ProcessLookupError):
                kill_group(os.getpgid(pid))
    for folder in Path(gettempdir()).glob(f"{folder_prefix(worker)}*"):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], [int(pid) for pid in sys.argv[4:]])
