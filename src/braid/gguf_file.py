"""The header of a GGUF file, the one-file format of llama.cpp, read without the package `gguf`, whose reader
takes seconds for a large vocabulary; and the folder in the user's cache that holds the file's model once it
is converted (models/gguf.py).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from typing import Any

from braid.cache import cache_folder

_LAYOUT = 1
"""Raised when conversion changes, so that folders of earlier versions are not used."""
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Formats of `struct` by GGUF's number of a type."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Header:
    """Settings by key, such as `llama.block_count`, and each tensor's shape, in PyTorch's order, and number
    of its quantization."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], int]]

    @property
    def architecture(self) -> str:
        return str(self.settings.get("general.architecture", ""))

    def setting(self, name: str) -> Any:
        """A setting of the architecture; None if the file lacks it."""
        return self.settings.get(f"{self.architecture}.{name}")


def is_gguf(path: str | Path) -> bool:
    """Whether `path` is an existing file whose name ends with `.gguf`."""
    return str(path).endswith(".gguf") and isfile(path)


def read_header(file: str | Path) -> Header:
    """Read the header. Raises OSError, and ValueError for a file that is not GGUF, is damaged, or has another
    byte order."""
    state = os.stat(file)
    return _read(str(file), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _read(file: str, modified: int, size: int) -> Header:  # noqa: ARG001
    with open(file, "rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file: it does not begin with GGUF")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _Reader(content).header()
            except (struct.error, UnicodeDecodeError, OverflowError, KeyError) as error:
                raise ValueError(f"{file} is damaged: its header cannot be read ({error})") from error


class _Reader:
    """Reads values one after the other. Raises struct.error at the end of the content."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 4

    def header(self) -> Header:
        (number,) = self._numbers("I", 1)
        if number not in (2, 3):
            raise ValueError(
                f"GGUF version {number if number < 2**16 else 'of another byte order'}, where 2 and 3 can "
                "be read"
            )
        num_tensors, num_settings = self._numbers("Q", 2)
        settings = {self._string(): self._value(*self._numbers("I", 1)) for _ in range(num_settings)}
        tensors = {}
        for _ in range(num_tensors):
            name = self._string()
            shape = self._numbers("Q", *self._numbers("I", 1))
            kind, _offset = *self._numbers("I", 1), self._numbers("Q", 1)
            tensors[name] = shape[::-1], kind
        return Header(settings, tensors)

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{kind}"
        values = struct.unpack_from(form, self._content, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = self._numbers("Q", 1)
        if self._at + size > len(self._content):
            raise struct.error("a text goes beyond the end of the file")
        self._at += size
        return self._content[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            (of_items,), (count,) = self._numbers("I", 1), self._numbers("Q", 1)
            if of_items in _NUMBERS:
                return list(self._numbers(_NUMBERS[of_items], count))
            return [self._value(of_items) for _ in range(count)]
        return self._numbers(_NUMBERS[kind], 1)[0]


def converted_folder(file: str | Path) -> Path:
    """The folder in the user's cache for the converted model of a GGUF file: another one once the file, or
    the packages that read it, change. Raises RuntimeError for a user without a home."""
    path = Path(file).resolve()
    state = path.stat()
    parts = [_LAYOUT, str(path), state.st_size, state.st_mtime_ns, _version("transformers"), _version("gguf")]
    name = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
    return cache_folder("gguf") / f"{path.stem}-{name}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
