"""Data sources: local files, Hugging Face data sets, reasoning-gym generators.

Owns reading rows and naming sources; prompts.py and worked.py interpret the columns.
Every error is a DataError that names the source's config key, such as `data.train[0]`.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from braid.config.data import FileSource, HubSource, ProceduralSource, Source, source_name
from braid.errors import DataError, suggest

from .columns import find

DataRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of one source. `config` is its section of the config, and `key` the path of that section."""

    name: str
    key: str
    config: Source
    rows: list[DataRow]

    def where(self, index: int) -> str:
        """A row in error messages."""
        return f"{self.key} ({self.name}), row {index}"

    def cell(self, index: int, key: str, path: str, *, or_else: str = "") -> Any:
        """Return a row's value at `path`, which key `key` of the source's section specifies. Raises DataError if
        there is no such column."""
        try:
            return find(self.rows[index], path)
        except LookupError as error:
            fix = f"set {self.key}.{key} to one of them" + (f", or {or_else}" if or_else else "")
            raise DataError(f"{self.where(index)}: {error}; {fix}") from None


def read_sources(sources: Sequence[Source], *, base_dir: Path, key: str) -> list[SourceRows]:
    """Read all rows of `sources`, the list at config key `key`; relative paths start from `base_dir`."""
    names = source_names(sources, key=key)
    out = []
    for i, (name, source) in enumerate(zip(names, sources, strict=True)):
        at = f"{key}[{i}]"
        rows = list(islice(_rows_of(source, base_dir, at), source.limit))
        if not rows:
            raise DataError(f"{at} ({name}): the dataset is empty; a source needs at least one row")
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


def _rows_of(source: Source, base_dir: Path, key: str) -> Iterable[DataRow]:
    match source:
        case FileSource():
            return _file_rows(source, base_dir, key)
        case HubSource():
            return _hub_rows(source, base_dir, key)
        case ProceduralSource():
            return _procedural_rows(source, key)


def _file_rows(source: FileSource, base_dir: Path, key: str) -> Iterator[DataRow]:
    paths = (source.path,) if isinstance(source.path, str) else source.path
    for path in [file for pattern in paths for file in _matches(pattern, base_dir, f"{key}.path")]:
        reader = _READERS.get(path.suffix)
        if reader is None:
            known = ", ".join(_READERS)
            raise DataError(f"{key}.path: unsupported file type: {path}; convert it to one of {known}")
        try:
            yield from reader(path)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from error
        except OSError as error:
            raise DataError(f"{key}.path: cannot read {path}: {error.strerror or error}") from error


def _matches(pattern: str, base_dir: Path, key: str) -> list[Path]:
    path = base_dir / Path(pattern).expanduser()
    if path.is_file():
        return [path]
    relative = "; paths are relative to the config's folder"
    if glob.has_magic(pattern):
        if found := sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()):
            return found
        raise DataError(f"{key}: no file matches {path}{relative}")
    if path.is_dir():
        example = f"{pattern.rstrip('/')}/*.jsonl"
        raise DataError(f"{key}: {path} is a folder; list its files, for example {example}")
    near = suggest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
    raise DataError(f"{key}: no such file: {path}{near or relative}")


def _read_jsonl(path: Path) -> Iterator[DataRow]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(_json(line.rstrip(), path, number), f"{path}:{number}")


def _read_json(path: Path) -> Iterator[DataRow]:
    rows = _json(path.read_text(encoding="utf-8-sig"), path)
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: contains a JSON {_json_type(rows)}; it must be a list of objects, one per row"
        )
    for i, row in enumerate(rows):
        yield _object(row, f"{path}: row {i}")


def _json(text: str, path: Path, number: int | None = None) -> Any:
    """Parse a file, or its line `number`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        is_jsonl = number is None and error.msg == "Extra data"
        hint = "; use the extension .jsonl for a file with one object per line" if is_jsonl else ""
        at = f"{path}:{number or error.lineno}"
        raise DataError(f"{at}: not JSON: {error.msg} at column {error.colno}{hint}") from error


def _read_csv(path: Path) -> Iterator[DataRow]:
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
                        f"{path}:{reader.line_num}: {len(cells)} cells, but the header has {len(header)} columns ({names}); "
                        "enclose cells that contain commas in double quotes"
                    )
                yield dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from error


def _read_parquet(path: Path) -> Iterator[DataRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


def _object(row: Any, where: str) -> DataRow:
    if not isinstance(row, dict):
        raise DataError(f"{where}: the row is a JSON {_json_type(row)}, but must be an object")
    return row


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _hub_rows(source: HubSource, base_dir: Path, key: str) -> Iterable[DataRow]:
    import datasets

    local = base_dir / Path(source.path).expanduser()
    has_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        path = str(local) if local.is_dir() else source.path
        return datasets.load_dataset(path, source.subset, split=source.split)  # pyright: ignore[reportReturnType]
    except Exception as error:  # of many types, all meaning that the data cannot be loaded
        raise DataError(
            f"{key}: cannot load dataset {source.path!r} (subset {source.subset}, split {source.split!r}): {error}; check "
            f"{key}.path (a name on the Hugging Face hub, or a folder), {key}.subset and {key}.split"
        ) from error
    finally:
        if has_bars:
            datasets.enable_progress_bars()


def _procedural_rows(source: ProceduralSource, key: str) -> Iterator[DataRow]:
    """The generator's entries; the column `reasoning_gym` holds what is needed to recreate the scorer."""
    from reasoning_gym.factory import DATASETS, create_dataset

    generator, params = source.generator, source.params
    if generator not in DATASETS:
        near = suggest(generator, DATASETS) or f"; available: {', '.join(sorted(DATASETS))}"
        raise DataError(f"{key}.generator: reasoning-gym has no generator {generator!r}{near}")
    known = [f.name for f in dataclasses.fields(DATASETS[generator][1]) if f.name not in ("size", "seed")]
    for name in params:
        if name in ("size", "seed"):
            raise DataError(f"{key}.params: set {name!r} as {key}.{name} instead")
        if name not in known:
            near = f"{suggest(name, known)}; available: {', '.join(known)}"
            raise DataError(f"{key}.params: {generator} has no parameter {name!r}{near}")
    try:
        entries = create_dataset(generator, size=source.size, seed=source.seed, **params)
    except Exception as error:  # generators validate their parameters differently, mostly by assert
        raise DataError(f"{key}.params: {generator} rejects {params}: {error}") from error
    for i in range(source.size):
        try:
            yield {**entries[i], "reasoning_gym": {"generator": generator, "params": params}}
        except Exception as error:
            raise DataError(f"{key}: {generator} failed to make task {i}: {error!r}") from error
