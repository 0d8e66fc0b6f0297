"""Atomic writes of small files, file locks, and strict JSON. After a crash at any moment, a file has either
its old or its new content."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, pieces: Iterable[str | bytes], *, is_private: bool = False) -> None:
    """Replace the file at `path` by the concatenation of `pieces`, text (UTF-8) or bytes. Raises OSError, and
    then keeps the old file. A private file is readable only by its owner."""
    beside = path.with_name(f".{path.name}.new")
    try:
        mode = 0o600 if is_private else 0o666
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            for piece in pieces:
                file.write(piece.encode() if isinstance(piece, str) else piece)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def lock(path: Path) -> int:
    """Take an exclusive lock on the file and return the descriptor that holds it, until it is closed or the
    process ends. Raises BlockingIOError when another process holds the lock."""
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        raise
    return number


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Serialise as strict JSON: non-finite numbers become null, and unsupported types become strings."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def human_bytes(count: float) -> str:
    """1536 as "1.5 KiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
