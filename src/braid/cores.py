"""CPU cores: how many this process may use, and how its threads wait for each other. Imports no library,
since OpenMP reads its variables when it is loaded, with PyTorch."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Have OpenMP's threads sleep while they wait, instead of spinning: GNU's libgomp (PyTorch, oneDNN, the
compiled kernels) and Intel's libiomp (vLLM on CPUs)."""
_OTHERS = ("GOMP_SPINCOUNT", "KMP_LIBRARY")
"""Variables with which a user chooses how threads wait, besides those of PASSIVE."""


def wait_passively(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set PASSIVE for this process and those that it starts, unless the user has set one of the variables of
    this kind.

    A spinning thread takes a core from the one that it waits for as soon as other processes want the cores
    too.
    """
    if any(name in environment for name in (*PASSIVE, *_OTHERS)):
        return
    environment.update(PASSIVE)
    if "torch" in sys.modules:
        logger.debug(
            "torch was imported before braid: in this process its threads spin while they wait; to change "
            "that, import braid first or set OMP_WAIT_POLICY=PASSIVE"
        )


def num_cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may use: of its CPU affinity, and at most the CPU quota of its
    container (cgroup v2 or v1, below `root`), rounded up."""
    num_available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_quota(folder) for folder in _control_groups(root))
    return max(1, min([num_available, *(math.ceil(quota) for quota in quotas if quota is not None)]))


def num_threads() -> int:
    """Number of threads that libraries start in this process: that of OMP_NUM_THREADS, or one for each
    core."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, int(asked)) if asked.isdigit() else num_cores()


def _control_groups(root: Path) -> list[Path]:
    """Folders of the control groups, v2 and v1, that this process is in, up to the top one."""
    top = root / "sys/fs/cgroup"
    folders = [top, top / "cpu"]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):
                group = Path(path.strip("/"))
                folders += [
                    base / inner
                    for base in ([top / "cpu"] if controllers else [top])
                    for inner in (group, *group.parents)
                ]
    return folders


def _quota(folder: Path) -> float | None:
    """CPU time per time that a control group allows; None without a limit."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    return None
