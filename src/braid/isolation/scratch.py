"""Private folders of sandboxed programs. A folder whose process was killed is removed when another process
first makes one."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_PREFIX = "braid-code-"
_LEAST_AGE_S = 60.0
"""A younger folder may not be locked yet."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A folder that is removed at the end. It is locked meanwhile, which shows other processes that it is in
    use."""
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        lock = os.open(folder, _OPEN)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield folder
        finally:
            os.close(lock)


@cache
def remove_abandoned() -> None:
    """Remove this user's folders (as root, all) that no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and os.getuid() in (0, status.st_uid)
            if is_own and time.time() - status.st_mtime > _LEAST_AGE_S:
                _remove_unless_locked(folder)


def _remove_unless_locked(folder: Path) -> None:
    lock = os.open(folder, _OPEN)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
