"""Rows that are parsed when they are read equal those that are parsed at once."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.config.data import FileSource
from braid.data import rows as of_rows
from braid.data.rows import Chained, JsonRows, Spool
from braid.data.sources import read_sources
from braid.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), min_size=1, max_size=9)


def _lines(path: Path) -> list[dict[str, Any]]:
    """As a text file is read."""
    with path.open(encoding="utf-8-sig") as lines:
        return [json.loads(line.rstrip()) for line in lines if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@given(
    rows=ROWS,
    end=st.sampled_from(
        ["\n", "\r\n", "\r", "\n\n", " \n", "\n \t\n", "\n\u00a0\n", "\u2028\n\x1c\r", "\r\n\u3000\x85 \n"]
    ),
    mark=st.booleans(),
    is_ended=st.booleans(),
    is_ascii=st.booleans(),
)
def test_lines_of_json(
    folder: Path, rows: list[dict[str, Any]], end: str, mark: bool, is_ended: bool, is_ascii: bool
) -> None:
    path = folder / "a.jsonl"
    text = end.join(json.dumps(row, ensure_ascii=is_ascii) for row in rows) + (end if is_ended else "")
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8", errors="surrogatepass"))
    lazy = JsonRows(path)
    assert list(lazy) == rows == _lines(path)
    assert [lazy[i] for i in reversed(range(len(lazy)))] == rows[::-1]
    assert list(pickle.loads(pickle.dumps(lazy))) == rows
    assert list(JsonRows(path, 2)) == rows[:2]
    assert list(Chained([lazy, JsonRows(path, 1)])) == [*rows, rows[0]]


@given(rows=ROWS)
def test_rows_larger_than_a_block(folder: Path, rows: list[dict[str, Any]]) -> None:
    path = folder / "blocks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = JsonRows(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_rows, "_BLOCK_BYTES", 5)
        lazy = JsonRows(path)
        assert list(lazy) == rows
        assert [lazy[i] for i in range(len(lazy))] == rows
    assert lazy.fingerprint == before.fingerprint


@pytest.mark.parametrize(
    "bad", ["{", "[1]", "3", '{"a": 1} {"a": 2}', "\x00", '{"a": ' + "[" * 500 + "]" * 500 + "}"]
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_bad_line_is_named_however_it_is_reached(tmp_path: Path, bad: str, mark: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{mark}{{"a": 1}}\n\n{bad}\n{{"a": 2}}\n')
    rows = JsonRows(path)
    assert (rows[0], rows[2]) == ({"a": 1}, {"a": 2})
    messages = []
    for read in (lambda: list(rows), lambda: rows[1]):
        with pytest.raises(DataError, match=r"a\.jsonl:3: ") as caught:
            read()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8 .*save the file as UTF-8"):
        list(JsonRows(path))


@pytest.mark.parametrize("change", ["cut", "written over", "appended to"])
def test_a_file_that_changes_during_a_run_is_an_error_and_no_other_row(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows = JsonRows(path)
    assert rows[0] == {"a": 1}
    text = {
        "cut": "",
        "written over": '{"a": 3}\n{"a": 4}\n',
        "appended to": '{"a": 1}\n{"a": 2}\n{"a": 3}\n',
    }
    path.write_text(text[change])
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"a\.jsonl has changed since the run read it; restore it"):
        rows[1]


def test_a_file_that_is_replaced_or_removed_keeps_its_rows_to_the_end_of_the_run(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    other.write_text('{"a": 3}\n{"a": 4}\n')
    rows = JsonRows(path)
    other.replace(path)
    assert rows[1] == {"a": 2}
    path.unlink()
    assert list(rows) == [{"a": 1}, {"a": 2}]


def test_of_many_files_those_beyond_a_number_are_not_kept_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        (tmp_path / f"{number}.jsonl").write_text(f'{{"a": {number}}}\n')
    gc.collect()  # files that earlier tests left in cycles
    monkeypatch.setattr(of_rows, "MAX_OPEN_FILES", len(of_rows._open_files) + 2)

    def num_open() -> int:
        links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
        return sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links)

    (source,) = read_sources([FileSource(path="*.jsonl")], base_dir=tmp_path, key="data.train")
    assert num_open() == 2
    assert list(source.rows) == [{"a": number} for number in range(9)]
    assert [source.rows[i] for i in (8, 0)] == [{"a": 8}, {"a": 0}]
    del source
    assert num_open() == 0


@pytest.mark.parametrize("change", ["written over", "replaced", "removed"])
def test_a_file_that_is_not_kept_open_must_not_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(of_rows, "MAX_OPEN_FILES", 0)
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file, text in ((path, '{"a": 1}\n{"a": 2}\n'), (other, '{"a": 3}\n{"a": 4}\n')):
        file.write_text(text)
        os.utime(file, ns=(1, 1))
    rows = JsonRows(path)
    assert rows[0] == {"a": 1}
    match change:
        case "written over":
            path.write_text('{"a": 3}\n{"a": 4}\n')
        case "replaced":  # by one of the same size and time
            other.replace(path)
        case _:
            path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl has changed since|cannot read .*a\.jsonl: No such file"):
        rows[1]


def test_repeated_keys_and_large_numbers_are_those_of_the_json_module(tmp_path: Path) -> None:
    lines = ['{"a": 1, "a": [2]}', f'{{"a": {10**400}, "b": -0.0}}', '{"a": 1e999, "b": NaN, "c": 1.0}', "{}"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows = JsonRows(tmp_path / "a.jsonl")
    expected = list(map(json.loads, lines))
    assert repr(list(rows)) == repr([rows[i] for i in range(4)]) == repr(expected)


def test_a_parquet_file_gives_equal_rows_by_index_and_in_order(tmp_path: Path) -> None:
    written = [{"a": i, "b": {"c": [i, None]}, "d": None if i % 2 else "x"} for i in range(50)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), tmp_path / "a.parquet", row_group_size=7)
    (source,) = read_sources([FileSource(path="a.parquet", limit=40)], base_dir=tmp_path, key="data.train")
    assert list(source.rows) == written[:40]
    assert [source.rows[i] for i in reversed(range(40))] == written[39::-1]
    assert list(pickle.loads(pickle.dumps(source.rows))) == written[:40]


ARROW = {
    "dictionary": pyarrow.array(["x", "y", None] * 1000).dictionary_encode(),
    "nested": pyarrow.array([{"k": [1, None], "m": {"z": 1.5}}] * 3000),
    "time": pyarrow.array([datetime(2020, 1, 1, 1, 2, 3, 4)] * 3000),
    "decimal": pyarrow.array([Decimal("1.23")] * 3000),
    "bytes": pyarrow.array([b"\xff"] * 3000),
    "map": pyarrow.array([[("a", 1)]] * 3000, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    "null": pyarrow.nulls(3000),
    "float": pyarrow.array([float("inf")] * 3000),
    "large": pyarrow.array(
        ["x" * 200_000 if i % 700 == 0 else f"{i}" for i in range(3000)], pyarrow.large_string()
    ),
}


@pytest.mark.parametrize("limit", [None, 1, 1100, 2500])
def test_parquet_values_of_all_kinds_are_those_of_arrow(tmp_path: Path, limit: int | None) -> None:
    pyarrow.parquet.write_table(pyarrow.table(ARROW), tmp_path / "a.parquet", row_group_size=1100)
    expected = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    source = FileSource(path=("a.parquet", "*.parquet"), limit=limit)
    (read,) = read_sources([source], base_dir=tmp_path, key="data.train")
    twice = [*expected, *expected][:limit]
    assert list(read.rows) == twice
    places = [place for place in (0, 1023, 1024, 1099, 1100, 2999, 3000) if place < len(twice)]
    assert [read.rows[place] for place in places] == [twice[place] for place in places]
    assert list(pickle.loads(pickle.dumps(read.rows))) == twice


def test_blocks_of_parquet_rows_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = pyarrow.array([f"word {i}" * 20 for i in range(5000)]).dictionary_encode()
    pyarrow.parquet.write_table(
        pyarrow.table({"word": words, "text": ["x" * 5000] * 5000}), tmp_path / "a.parquet"
    )
    sizes, add = [], Spool.add
    monkeypatch.setattr(
        Spool, "add", lambda self, data: (sizes.append(len(memoryview(data))), add(self, data))[1]
    )
    read_sources([FileSource(path="a.parquet")], base_dir=tmp_path, key="data.train")
    assert max(sizes) < 2 * of_rows.ARROW_BYTES
    assert sum(sizes) < 5000 * 5400


def test_a_full_disk_is_an_error_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "a.parquet")

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(DataError, match=r"cannot keep rows .* No space left on device; set .* TMPDIR"):
        read_sources([FileSource(path="a.parquet")], base_dir=tmp_path, key="data.train")
