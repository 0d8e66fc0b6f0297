"""Compiles C functions of kernels, and keeps their machine code on disk.

Numba takes code from its cache if the file of the function is unchanged, even if another has changed from
which it inlined functions. So the folder is named by a hash of all files of this package.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

from numba import cfunc, config, types

_log = logging.getLogger(__name__)
_settings: Any = config
_lock = Lock()


def c_function(**options: Any) -> Callable[[Callable[[Any], None]], Any]:
    """Decorator: Numba's `cfunc` for a function of one address. Files that cannot be read or written are no
    error."""
    compiler: Any = partial(cfunc, types.void(types.voidptr), error_model="numpy", **options)

    def compiled(function: Callable[[Any], None]) -> Any:
        for _ in range(2):
            if (folder := _folder()) is None:
                break
            try:
                with _kept_in(folder):
                    return compiler(cache=True)(function)
            except Exception as error:  # of a damaged file, any
                _log.warning("kernels are compiled anew, because %s cannot be used: %r", folder, error)
                shutil.rmtree(folder, ignore_errors=True)
        return compiler()(function)

    return compiled


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    with _lock:
        before, _settings.CACHE_DIR = _settings.CACHE_DIR, str(folder)
        try:
            yield
        finally:
            _settings.CACHE_DIR = before


@cache
def _folder() -> Path | None:
    """The first folder that can be written; None if there is none."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    name = f"braid-kernels-{digest.hexdigest()[:16]}"
    folder = next((parent / name for parent in _parents() if _is_writable(parent / name)), None)
    if folder is None:
        _log.info(
            "kernels are compiled anew in every process: there is no folder to keep them in (NUMBA_CACHE_DIR)"
        )
    return folder


def _parents() -> Iterator[Path]:
    if _settings.CACHE_DIR:
        yield Path(_settings.CACHE_DIR)
    yield Path(__file__).parent / "__pycache__"
    with suppress(RuntimeError):  # no home folder
        yield Path.home() / ".cache" / "numba"
    temporary = Path(tempfile.gettempdir()) / f"braid-{os.getuid()}"
    with suppress(OSError):
        temporary.mkdir(mode=0o700, exist_ok=True)
        status = temporary.lstat()  # machine code that another user could replace must not run
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            yield temporary


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
