"""Kills for lack of memory, as the kernel counts them for this process's control group."""

from __future__ import annotations

import time
from pathlib import Path

_WINDOW_S = 1.0


class KillCount:
    """Detects whether the kernel has just killed a process of this control group for lack of memory.

    The counter is `oom_kill` of the control group: memory.events in version 2, memory.oom_control in version
    1 (https://docs.kernel.org/admin-guide/cgroup-v2.html). Without a counter no kill is detected.
    """

    def __init__(self, file: Path | None = None) -> None:
        """`file` has the counter; that of this process's group by default."""
        self._file = file or _own_file()
        self._now = self._before = _read(self._file)
        self._now_s = time.monotonic()

    def update(self) -> None:
        """Read the counter; to be called about every half second."""
        now_s = time.monotonic()
        if now_s - self._now_s >= _WINDOW_S / 2:
            self._before, self._now, self._now_s = self._now, _read(self._file), now_s

    def has_risen(self) -> bool:
        """Whether it has risen within about a second."""
        return _read(self._file) > self._before


def _own_file() -> Path | None:
    """Path of the counter. A container often sees its own group as the root, whatever the group's name
    outside."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = {controller: path.lstrip("/") for _, controller, path in (line.split(":", 2) for line in lines)}
    roots = {
        "memory": (Path("/sys/fs/cgroup/memory"), "memory.oom_control"),
        "": (Path("/sys/fs/cgroup"), "memory.events"),
    }
    for controller, (root, name) in roots.items():
        for file in (root / groups.get(controller, "") / name, root / name):
            if controller in groups and file.exists():
                return file
    return None


def _read(file: Path | None) -> int:
    try:
        lines = [] if file is None else file.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0
