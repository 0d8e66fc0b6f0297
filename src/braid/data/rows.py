"""Rows that stay on disk or in compact form, each parsed when it is read.

`JsonRows` are lines of JSON in a file, or in memory for files that are no lines of JSON; `ArrowRows` are
those of a parquet file, uncompressed in a temporary file; `Chained` are those of several files. All give the
same dicts each time, and can be sent to workers on machines that lack the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from braid.errors import DataError
from braid.json_text import MAX_DEPTH, json_type, parse_json

DataRow = dict[str, Any]
T = TypeVar("T")

_BLOCK_BYTES = 1 << 22
ARROW_ROWS, ARROW_BYTES = 1024, 1 << 20
"""Most rows of a block of Arrow data, and its size if it has more than one."""
MAX_OPEN_FILES = 256
"""Files of rows that stay open. Those beyond are opened for each read; such a file must not be replaced."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_scan: Any = json.JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]


class Lazy(Sequence[T]):
    """Items that are made when they are read."""

    fingerprint = ""
    """Identifies the content; empty where it is unknown."""

    def item(self, index: int) -> T:
        """The item at an index from 0 to the length."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        chosen = range(len(self))[index]
        return self.item(chosen) if isinstance(chosen, int) else [self.item(i) for i in chosen]


class Chained(Lazy[T]):
    """The items of several sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts, self._ends = parts, list(accumulate(map(len, parts)))
        of_parts = [getattr(part, "fingerprint", "") for part in parts]
        self.fingerprint = " ".join(of_parts) if all(of_parts) else ""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def item(self, index: int) -> T:
        """The item at an index into the joined sequences."""
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts)


class Rest(Lazy[T]):
    """The items of a sequence without the first `skip`."""

    def __init__(self, items: Sequence[T], skip: int) -> None:
        self._items, self._skip = items, skip
        self.fingerprint = getattr(items, "fingerprint", "")

    def __len__(self) -> int:
        return max(0, len(self._items) - self._skip)

    def item(self, index: int) -> T:
        """The item at an index after the first `skip`."""
        return self._items[self._skip + index]


def _state(file: int) -> tuple[int, int, int, int]:
    """What changes with the content of an open file."""
    state = os.fstat(file)
    return state.st_size, state.st_mtime_ns, state.st_ino, state.st_dev


_open_files: weakref.WeakSet[JsonRows] = weakref.WeakSet()


class JsonRows(Lazy[DataRow]):
    """One JSON object per line. Reading a row raises DataError if it is none, or if the file has changed."""

    def __init__(self, source: Path | bytes, limit: int | None = None, *, name: str = "") -> None:
        """`source` is a file, or lines of JSON in memory, which errors call `name`. Raises OSError."""
        self._name = name or str(source)
        self._text = source if isinstance(source, bytes) else None
        self._path, self._file = source, None
        if isinstance(source, Path):
            file = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            self._state = _state(file)
            if len(_open_files) < MAX_OPEN_FILES:
                self._file = file
                _open_files.add(self)
                weakref.finalize(self, os.close, file)
            else:
                os.close(file)
        self._starts, self.fingerprint = self._index(limit)
        self._last: tuple[int, DataRow] = (-1, {})

    @classmethod
    def of(cls, rows: Iterable[DataRow], name: str) -> JsonRows:
        """Rows kept in memory as text."""
        return cls(b"".join(json.dumps(row).encode() + b"\n" for row in rows), name=name)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def item(self, index: int) -> DataRow:
        """The row at an index, parsed now; the last one is kept."""
        at, row = self._last
        if at != index:
            start, end = self._starts[index : index + 2].tolist()
            row = self._parse(self._read(start, end), start)
            self._last = (index, row)
        return row

    def __iter__(self) -> Iterator[DataRow]:
        first = 0
        while first < len(self):
            start = int(self._starts[first])
            last = max(first + 1, int(np.searchsorted(self._starts, start + _BLOCK_BYTES)) - 1)
            offsets = (self._starts[first : last + 1] - start).tolist()
            block = self._read(start, start + offsets[-1])
            for i in range(last - first):
                line = block[offsets[i] : offsets[i + 1]]
                try:
                    text = line.decode().rstrip()
                    row, end = _scan(text, 0)
                    is_shallow = end < MAX_DEPTH or text.count("{") + text.count("[") <= MAX_DEPTH
                    is_row = end == len(text) and type(row) is dict and is_shallow
                except (ValueError, StopIteration, RecursionError):
                    row, is_row = {}, False
                if not is_row:  # this raises, but for space around the object
                    row = self._parse(line, start + offsets[i])
                self._last = (first + i, row)
                yield row
            first = last

    def _index(self, limit: int | None) -> tuple[NDArray[np.int64], str]:
        """Where each row starts, and the end of the last; and a hash of the content."""
        row_starts, count, at, content = [], 0, 0, hashlib.blake2b(digest_size=16)
        for block in self._blocks():
            content.update(block)
            lines = block.splitlines(keepends=True)
            ends = np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines))) + at
            starts = np.concatenate(([at], ends[:-1]))
            if at == 0 and lines[0].startswith(_BYTE_ORDER_MARK):
                starts[0], lines[0] = len(_BYTE_ORDER_MARK), lines[0][len(_BYTE_ORDER_MARK) :] or b"\n"
            is_row = np.fromiter(
                (line[:1] == b"{" or not _is_blank(line) for line in lines), bool, len(lines)
            )
            row_starts.append(starts[is_row])
            count, at = count + int(is_row.sum()), int(ends[-1])
            if limit is not None and count > limit:
                break
        starts = np.concatenate([*row_starts, np.array([at], np.int64)])
        cut = starts if limit is None else starts[: limit + 1]
        return cut, f"{content.hexdigest()}:{len(cut)}"

    def _blocks(self) -> Iterator[bytes]:
        """The content in blocks of whole lines."""
        size = len(self._text) if self._text is not None else self._state[0]
        at, length = 0, _BLOCK_BYTES
        while at < size:
            block = self._read(at, min(at + length, size))
            if at + len(block) < size:  # a lone carriage return ends a line too, but may be half of an end
                block = block[: block.rfind(b"\n") + 1]
            if block:
                yield block
                at, length = at + len(block), _BLOCK_BYTES
            else:
                length *= 2

    def _read(self, start: int, end: int) -> bytes:
        if self._text is not None:
            return self._text[start:end]
        try:
            file = self._file
            if file is None:
                assert isinstance(self._path, Path), "text in memory has no file"
                file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data, state = os.pread(file, end - start, start), _state(file)
            finally:
                if self._file is None:
                    os.close(file)
        except OSError as error:
            raise DataError(f"cannot read {self._name}: {error.strerror or error}") from error
        if len(data) < end - start or state != self._state:
            raise DataError(
                f"{self._name} has changed since the run read it; restore it, or start again with the new "
                "data"
            )
        return data

    def _parse(self, line: bytes, start: int) -> DataRow:
        """Parse the line at byte `start`. Raises DataError with its number."""
        try:
            row = parse_json(line.decode().rstrip())
        except UnicodeDecodeError as error:
            raise DataError(f"{self._at(start)}: not UTF-8 ({error}); save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{self._at(start)}: not JSON: {error.msg} at column {error.colno}") from error
        except ValueError as error:  # nested too deeply, or an integer of too many digits
            raise DataError(f"{self._at(start)}: {error}") from error
        return (
            row if isinstance(row, dict) else as_row(row, self._at(start))
        )  # the line is looked up only for errors

    def _at(self, start: int) -> str:
        """A line in messages."""
        number, at = 1, 0
        for block in self._blocks():
            before = block[: max(0, start - at)]
            number, at = number + len(before.splitlines()), at + len(block)
        if start == len(_BYTE_ORDER_MARK) and self._read(0, start) == _BYTE_ORDER_MARK:
            number -= 1
        return f"{self._name}:{number}"

    def __reduce__(self) -> tuple[Any, ...]:
        text = self._text if self._text is not None else self._read(0, int(self._starts[-1]))
        return _unpickled, (text, len(self), self._name)


def as_row(value: Any, where: str) -> DataRow:
    """The parsed JSON as a row. Raises DataError if it is no object."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: the row is a JSON {json_type(value)}, but must be an object")
    return value


def _is_blank(line: bytes) -> bool:
    """Whether a line is white space, of Unicode too."""
    return line.isspace() or not line.decode(errors="replace").strip()


def _unpickled(text: bytes, limit: int, name: str) -> JsonRows:
    return JsonRows(text, limit, name=name)


class Spool:
    """A temporary file for the rows of a source, which is removed when the process ends or no longer needs
    it."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._size = 0

    def add(self, data: Any) -> int:
        """Write bytes, and return where they start. Raises DataError if they cannot be written."""
        start = self._size
        try:
            if self._file is None:
                with tempfile.TemporaryFile() as file:
                    self._file = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._file)
            view = memoryview(data)
            while view:
                num_written = os.pwrite(self._file, view, self._size)
                view, self._size = view[num_written:], self._size + num_written
        except OSError as error:
            why = f"cannot keep rows of parquet files in {tempfile.gettempdir()}: {error.strerror or error}"
            raise DataError(
                f"{why}; set the environment variable TMPDIR to a folder with more space"
            ) from error
        return start

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`. Raises DataError if they cannot be read."""
        assert self._file is not None, "nothing was written"
        try:
            return os.pread(self._file, end - start, start)
        except OSError as error:
            raise DataError(f"cannot read a temporary file of rows: {error.strerror or error}") from error


class ArrowRows(Lazy[DataRow]):
    """The rows of Arrow record batches, written to a temporary file in blocks that can be read on their
    own."""

    def __init__(self, batches: Iterable[Any], spool: Spool, fingerprint: str = "") -> None:
        """Raises DataError if the temporary file cannot be written."""
        import pyarrow

        self._spool, self._ends = spool, [0]
        self._places: list[tuple[int, int]] = []
        for batch in map(_plain, batches):
            num_rows = min(ARROW_ROWS, max(1, len(batch) * ARROW_BYTES // max(1, batch.nbytes)))
            for first in range(0, len(batch), num_rows):
                part = batch[first : first + num_rows]
                with pyarrow.ipc.new_stream(sink := pyarrow.BufferOutputStream(), part.schema) as stream:
                    stream.write_batch(part)
                block = sink.getvalue()
                start = spool.add(block)
                self._places.append((start, start + block.size))
                self._ends.append(self._ends[-1] + len(part))
        self.fingerprint = f"{fingerprint}:{len(self)}" if fingerprint else ""
        self._last: tuple[int, DataRow] = (-1, {})

    def __len__(self) -> int:
        return self._ends[-1]

    def item(self, index: int) -> DataRow:
        """The row at an index, read from its block; the last one is kept."""
        at, row = self._last
        if at != index:
            number = bisect_right(self._ends, index) - 1
            (row,) = self._block(number).slice(index - self._ends[number], 1).to_pylist()
            self._last = (index, row)
        return row

    def __iter__(self) -> Iterator[DataRow]:
        for number, first in enumerate(self._ends[:-1]):
            for index, row in enumerate(self._block(number).to_pylist(), start=first):
                self._last = (index, row)
                yield row

    def _block(self, number: int) -> Any:
        import pyarrow

        return pyarrow.ipc.open_stream(self._spool.read(*self._places[number])).read_next_batch()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_arrow, ([self._block(number) for number in range(len(self._places))],)


def _plain(batch: Any) -> Any:
    """A record batch without dictionaries, each of which would be written with each block, and without
    metadata."""
    import pyarrow

    are_coded = (isinstance(column, pyarrow.DictionaryArray) for column in batch.columns)
    columns = [
        column.dictionary_decode() if is_coded else column
        for column, is_coded in zip(batch.columns, are_coded, strict=True)
    ]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _unpickled_arrow(batches: Sequence[Any]) -> ArrowRows:
    return ArrowRows(batches, Spool())
