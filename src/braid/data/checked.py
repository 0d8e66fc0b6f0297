"""What reading all rows has shown, kept for the next start with the same data: files in the user's cache
folder.

Each is named by a hash of all that the result depends on, and begins with a hash of its content. Nothing is
kept of small data, which is read quickly.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import braid
from braid.cache import cache_folder

logger = logging.getLogger(__name__)

MIN_ROWS = 50_000
MAX_FILES = 1000
MAX_BYTES = 2**30
"""Results used longest ago are removed beyond either."""
_HASH_BYTES = 16
_DAY_S = 24 * 3600


def key_of(num_rows: int, *parts: Any) -> str:
    """The name of a result that depends on `parts`, JSON data; empty, for none, if there are few rows or an
    empty part."""
    if num_rows < MIN_ROWS or not all(parts):
        return ""
    return hashlib.blake2b(json.dumps([braid.__version__, *parts]).encode(), digest_size=16).hexdigest()


def recall(key: str) -> dict[str, Any] | None:
    """The arrays kept under `key`; None if there are none, or the file is damaged or not braid's."""
    folder = _folder()
    if not key or folder is None:
        return None
    file = folder / f"{key}.checked"
    try:
        content = file.read_bytes()
    except OSError:
        return None
    arrays = content[_HASH_BYTES:]
    if content[:_HASH_BYTES] != _hash(key, arrays):
        return None
    with suppress(OSError):
        file.touch()
    with np.load(io.BytesIO(arrays)) as kept:
        return dict(kept)


def keep(key: str, arrays: Mapping[str, Any]) -> None:
    """Keep arrays under `key`, if the folder can be written."""
    folder = _folder()
    if not key or folder is None:
        return
    content = io.BytesIO()
    np.savez(content, **arrays)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".new", delete=False) as file:
            try:
                file.write(_hash(key, content.getbuffer()))
                file.write(content.getbuffer())
                file.flush()
                os.replace(file.name, folder / f"{key}.checked")
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        _say_not_kept(folder, error.strerror or str(error))
    else:
        _clean(folder)


def _hash(key: str, arrays: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=_HASH_BYTES)
    digest.update(arrays)
    return digest.digest()


def _clean(folder: Path) -> None:
    """Remove results used longest ago, and what killed processes left. Other processes may do the same."""
    files: list[tuple[float, int, Path]] = []
    for file in folder.iterdir():
        with suppress(OSError):
            state = file.stat()
            if file.suffix == ".checked":
                files.append((state.st_mtime, state.st_size, file))
            elif file.suffix == ".new" and state.st_mtime < time.time() - _DAY_S:
                file.unlink()
    total = 0
    for number, (_, size, file) in enumerate(sorted(files, reverse=True)):
        total += size
        if number >= MAX_FILES or total > MAX_BYTES:
            with suppress(OSError):
                file.unlink()


@cache
def _say_not_kept(folder: Path, why: str) -> None:
    """Log once why the folder cannot be written."""
    logger.info("the checks of the data are not kept for the next start: cannot write %s: %s", folder, why)


def _folder() -> Path | None:
    """The folder of results; None for a user without a home."""
    try:
        return cache_folder("data")
    except RuntimeError:
        return None
