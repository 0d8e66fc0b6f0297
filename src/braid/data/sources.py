"""Data sources: local files, Hugging Face data sets, reasoning-gym generators.

Owns reading rows and naming sources; prompts.py and worked.py interpret the columns.
Every error is a DataError that names the source's config key, such as `data.train[0]`.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from os.path import isdir, isfile  # False for names that no file can have
from pathlib import Path
from typing import Any

from braid.config.data import FileSource, HubSource, ProceduralSource, Source, source_name
from braid.errors import DataError, suggest
from braid.generators import MissingGenerator, reasoning_gym
from braid.json_text import json_type, parse_json

from .columns import find
from .rows import ARROW_BYTES, ARROW_ROWS, ArrowRows, Chained, DataRow, JsonRows, Rest, Spool, as_row

logger = logging.getLogger(__name__)
SLOW_S = 3.0


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of one source. `config` is its section of the config, and `key` the path of that section."""

    name: str
    key: str
    config: Source
    rows: Sequence[DataRow]

    @property
    def fingerprint(self) -> str:
        """Identifies the rows and the settings of the source; empty where the rows are unknown."""
        rows = getattr(self.rows, "fingerprint", "")
        return f"{rows} {self.config.model_dump_json()}" if rows else ""

    def where(self, index: int) -> str:
        """A row in error messages, counted from the start of the data."""
        return f"{self.key} ({self.name}), row {self.config.skip + index}"

    def cell(self, index: int, key: str, path: str, *, or_else: str = "") -> Any:
        """Return a row's value at `path`, which key `key` of the source's section specifies. Raises DataError
        if there is no such column."""
        try:
            return find(self.rows[index], path)
        except LookupError as error:
            fix = f"set {self.key}.{key} to one of them" + (f", or {or_else}" if or_else else "")
            raise DataError(f"{self.where(index)}: {error}; {fix}") from None


@contextmanager
def said_if_slow(key: str) -> Iterator[None]:
    """Log one line if reading the sources at config key `key` takes more than SLOW_S seconds."""
    message = "%s: reading and checking the rows takes more than %g s"
    timer = threading.Timer(SLOW_S, logger.info, (message, key, SLOW_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def read_sources(sources: Sequence[Source], *, base_dir: Path, key: str) -> list[SourceRows]:
    """Open `sources`, the list at config key `key`; relative paths start from `base_dir`. A row is parsed
    when it is read, which raises DataError if it cannot be."""
    names = source_names(sources, key=key)
    out = []
    for i, (name, source) in enumerate(zip(names, sources, strict=True)):
        at = f"{key}[{i}]"
        rows = _rows_of(source, base_dir, at)
        if not len(rows):
            raise DataError(f"{at} ({name}): the dataset is empty; a source needs at least one row")
        if source.skip:
            if len(rows) <= source.skip:
                why = f"the dataset has {len(rows)} rows, and skip={source.skip} leaves none"
                raise DataError(f"{at} ({name}): {why}; lower {at}.skip")
            rows = Rest(rows, source.skip)
        out.append(SourceRows(name, at, source, rows))
    return out


def source_names(sources: Sequence[Source], *, key: str) -> list[str]:
    """The name of each source in metrics. Raises DataError if two sources have the same name."""
    names = [source_name(source) for source in sources]
    for i, name in enumerate(names):
        first = names.index(name)
        if first != i:
            raise DataError(
                f"{key}[{first}] and {key}[{i}] are both named {name!r}, but metrics need unique names; "
                f"change {key}[{i}].name"
            )
    return names


def _rows_of(source: Source, base_dir: Path, key: str) -> Sequence[DataRow]:
    match source:
        case FileSource():
            return _file_rows(source, base_dir, key)
        case HubSource():
            return _hub_rows(source, base_dir, key)
        case ProceduralSource():
            return list(islice(_procedural_rows(source, key), source.end))


def _file_rows(source: FileSource, base_dir: Path, key: str) -> Sequence[DataRow]:
    paths = (source.path,) if isinstance(source.path, str) else source.path
    parts, limit = [], source.end
    readers = {**_READERS, ".parquet": partial(_parquet, spool=Spool())}
    for path in [file for pattern in paths for file in _matches(pattern, base_dir, f"{key}.path")]:
        reader = readers.get(path.suffix)
        if reader is None:
            known = ", ".join(readers)
            raise DataError(f"{key}.path: unsupported file type: {path}; convert it to one of {known}")
        try:
            parts.append(reader(path, limit))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from error
        except OSError as error:
            raise DataError(f"{key}.path: cannot read {path}: {error.strerror or error}") from error
        if limit is not None:
            limit -= len(parts[-1])
            if limit == 0:
                break
    return parts[0] if len(parts) == 1 else Chained(parts)


def _matches(pattern: str, base_dir: Path, key: str) -> list[Path]:
    path = base_dir / Path(pattern).expanduser()
    if isfile(path):
        return [path]
    relative = "; paths are relative to the config's folder"
    if glob.has_magic(pattern):
        if files := sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()):
            return files
        raise DataError(f"{key}: no file matches {path}{relative}")
    if isdir(path):
        example = f"{pattern.rstrip('/')}/*.jsonl"
        raise DataError(f"{key}: {path} is a folder; list its files, for example {example}")
    near = suggest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
    raise DataError(f"{key}: no such file: {path}{near or relative}")


def _json_rows(path: Path) -> Iterator[DataRow]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = parse_json(text)
    except json.JSONDecodeError as error:
        hint = "; use the extension .jsonl for a file with one object per line"
        hint = hint if error.msg == "Extra data" else ""
        raise DataError(
            f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}{hint}"
        ) from error
    except ValueError as error:  # nested too deeply, or an integer of too many digits
        raise DataError(f"{path}: {error}") from error
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: contains a JSON {json_type(rows)}; it must be a list of objects, one per row"
        )
    for i, row in enumerate(rows):
        yield as_row(row, f"{path}: row {i}")


def _csv_rows(path: Path) -> Iterator[DataRow]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            names = ", ".join(header)
            if len(set(header)) < len(header):
                raise DataError(f"{path}:1: duplicate column name: {names}")
            for cells in filter(None, reader):
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}:{reader.line_num}: {len(cells)} cells, but the header has {len(header)} "
                        f"columns ({names}); enclose cells that contain commas in double quotes"
                    )
                yield dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from error


def _in_memory(rows: Callable[[Path], Iterator[DataRow]], path: Path, limit: int | None) -> Sequence[DataRow]:
    return JsonRows.of(islice(rows(path), limit), str(path))


def _parquet(path: Path, limit: int | None, spool: Spool) -> Sequence[DataRow]:
    import pyarrow
    import pyarrow.parquet

    def batches(file: pyarrow.parquet.ParquetFile) -> Iterator[Any]:
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        size, num_rows = sum(group.total_byte_size for group in groups), file.metadata.num_rows
        num_at_once = min(ARROW_ROWS, max(1, num_rows * ARROW_BYTES // max(1, size)))
        num_left = num_rows if limit is None else limit
        for batch in file.iter_batches(num_at_once):
            yield batch[:num_left]
            num_left -= len(batch)
            if num_left <= 0:
                break

    with path.open("rb") as opened:
        content = hashlib.file_digest(opened, "blake2b").hexdigest()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return ArrowRows(batches(file), spool, content)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


_READERS: dict[str, Callable[[Path, int | None], Sequence[DataRow]]] = {
    ".jsonl": JsonRows,
    ".json": partial(_in_memory, _json_rows),
    ".csv": partial(_in_memory, _csv_rows),
}


def _hub_rows(source: HubSource, base_dir: Path, key: str) -> Sequence[DataRow]:
    import datasets

    local = base_dir / Path(source.path).expanduser()
    has_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        path = str(local) if isdir(local) else source.path
        rows: Any = datasets.load_dataset(path, source.subset, split=source.split)
        return rows if source.end is None else rows.select(range(min(source.end, len(rows))))
    except Exception as error:  # of many types, all meaning that the data cannot be loaded
        raise DataError(
            f"{key}: cannot load dataset {source.path!r} (subset {source.subset}, split {source.split!r}): "
            f"{error}; check {key}.path (a name on the Hugging Face hub, or a folder), {key}.subset and "
            f"{key}.split"
        ) from error
    finally:
        if has_bars:
            datasets.enable_progress_bars()


def _procedural_rows(source: ProceduralSource, key: str) -> Iterator[DataRow]:
    """The generator's entries; the column `reasoning_gym` holds what is needed to recreate the scorer."""
    generator, params = source.generator, source.params
    try:
        factory = reasoning_gym(generator)
    except MissingGenerator as error:
        raise DataError(f"{key}.generator: {error}") from error
    if generator not in factory.DATASETS:
        near = suggest(generator, factory.DATASETS) or f"; available: {', '.join(sorted(factory.DATASETS))}"
        raise DataError(f"{key}.generator: reasoning-gym has no generator {generator!r}{near}")
    known = [
        f.name for f in dataclasses.fields(factory.DATASETS[generator][1]) if f.name not in ("size", "seed")
    ]
    for name in params:
        if name in ("size", "seed"):
            raise DataError(f"{key}.params: set {name!r} as {key}.{name} instead")
        if name not in known:
            near = f"{suggest(name, known)}; available: {', '.join(known)}"
            raise DataError(f"{key}.params: {generator} has no parameter {name!r}{near}")
    try:
        entries = factory.create_dataset(generator, size=source.size, seed=source.seed, **params)
    except Exception as error:  # generators validate their parameters differently, mostly by assert
        raise DataError(f"{key}.params: {generator} rejects {params}: {error}") from error
    for i in range(source.size):
        try:
            entry = entries[i]
            of_scorer = {"generator": generator, "params": params, "answer": entry["answer"]}
            yield {**entry, "reasoning_gym": of_scorer}
        except Exception as error:
            raise DataError(f"{key}: {generator} failed to make task {i}: {error!r}") from error
