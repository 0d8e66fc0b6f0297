from __future__ import annotations

import csv
import json
import pickle
import threading
import time
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from braid.config.data import FileSource, HubSource, ProceduralSource
from braid.data import sources
from braid.data.sources import read_sources, source_names
from braid.errors import DataError

ROWS = [{"prompt": f"1 + {i}", "answer": str(1 + i)} for i in range(3)]


def _write(folder: Path, name: str, rows: list[dict[str, str]] = ROWS) -> Path:
    path = folder / name
    match path.suffix:
        case ".jsonl":
            path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
        case ".json":
            path.write_text(json.dumps(rows))
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["prompt", "answer"])
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _read(source: FileSource | HubSource | ProceduralSource, base_dir: Path) -> list[dict[str, object]]:
    (only,) = read_sources([source], base_dir=base_dir, key="data.train")
    rows = list(only.rows)
    assert [only.rows[i] for i in reversed(range(len(only.rows)))] == rows[::-1]
    return rows


def _error(source: FileSource | HubSource | ProceduralSource, base_dir: Path) -> str:
    with pytest.raises(DataError) as caught:
        _read(source, base_dir)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    _write(tmp_path, name)
    assert _read(FileSource(path=name), tmp_path) == ROWS


def test_several_files_and_globs_are_read_in_order(tmp_path: Path) -> None:
    for i, row in enumerate(ROWS):
        _write(tmp_path, f"part-{2 - i}.jsonl", [row])
    assert _read(FileSource(path="part-*.jsonl"), tmp_path) == ROWS[::-1]
    assert _read(FileSource(path=("part-1.jsonl", "part-2.jsonl")), tmp_path) == [ROWS[1], ROWS[0]]


def test_a_limit_keeps_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.jsonl")
    path.write_text(path.read_text() + "not json\n")
    assert _read(FileSource(path="a.jsonl", limit=2), tmp_path) == ROWS[:2]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_rows_at_the_start_are_left_out(tmp_path: Path, name: str) -> None:
    _write(tmp_path, name)
    assert _read(FileSource(path=name, skip=1), tmp_path) == ROWS[1:]
    assert _read(FileSource(path=name, skip=1, limit=1), tmp_path) == ROWS[1:2]
    assert _read(FileSource(path=(name, name), skip=2, limit=2), tmp_path) == [ROWS[2], ROWS[0]]
    (rows,) = read_sources([FileSource(path=name, skip=2)], base_dir=tmp_path, key="data.train")
    assert rows.where(0) == "data.train[0] (a), row 2"
    assert list(pickle.loads(pickle.dumps(rows.rows))) == ROWS[2:]
    message = "data.train[0] (a): the dataset has 3 rows, and skip=3 leaves none; lower data.train[0].skip"
    assert _error(FileSource(path=name, skip=3), tmp_path) == message


def test_an_absolute_path_is_not_looked_up_from_the_config(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.jsonl")
    assert _read(FileSource(path=str(path)), Path("/nowhere")) == ROWS


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    _write(tmp_path, "train.jsonl")
    assert _error(FileSource(path="trian.jsonl"), tmp_path) == (
        f"data.train[0].path: no such file: {tmp_path}/trian.jsonl, did you mean 'train.jsonl'?"
    )
    assert "paths are relative to the config's folder" in _error(FileSource(path="no/x.jsonl"), tmp_path)


def test_a_glob_without_files_says_so(tmp_path: Path) -> None:
    assert f"no file matches {tmp_path}/*.csv" in _error(FileSource(path="*.csv"), tmp_path)


def test_a_folder_or_unknown_ending_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "is a folder; list its files, for example folder/*.jsonl" in _error(
        FileSource(path="folder"), tmp_path
    )
    (tmp_path / "a.txt").write_text("x")
    assert "a.txt; convert it to one of .jsonl, .json, .csv, .parquet" in _error(
        FileSource(path="a.txt"), tmp_path
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "1"}\n{"prompt": \n', "a.jsonl:2: not JSON: Expecting value at column 11"),
        (
            "a.jsonl",
            '{"prompt": "1"}\n\n[1, 2]\n',
            "a.jsonl:3: the row is a JSON list, but must be an object",
        ),
        ("a.json", '[\n{"a": 1},\n{"a" 2}]', "a.json:3: not JSON: Expecting ':' delimiter at column 6"),
        (
            "a.json",
            '{"a": 1}\n{"a": 2}',
            "not JSON: Extra data at column 1; use the extension .jsonl",
        ),
        ("a.json", '{"a": 1}', "contains a JSON object; it must be a list of objects"),
        ("a.json", '[{"a": 1}, "b"]', "a.json: row 1: the row is a JSON string, but must be an object"),
        ("a.csv", "prompt,answer\n1,2\n1,2,3\n", "a.csv:3: 3 cells, but the header has 2 columns"),
        ("a.csv", 'prompt,answer\n"1,2\n', "a.csv:2: not CSV: unexpected end of data"),
        ("a.csv", "x,x\n1,2\n", "a.csv:1: duplicate column name: x, x"),
        ("a.parquet", "PAR0", "not a readable parquet file"),
    ],
)
def test_a_malformed_file_is_reported_with_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    assert message in _error(FileSource(path=name), tmp_path)


def test_a_file_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}')
    assert "not UTF-8" in _error(FileSource(path="a.jsonl"), tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_an_empty_dataset_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text({"a.json": "[]", "a.csv": "prompt,answer\n", "a.jsonl": ""}[name])
    assert (
        _error(FileSource(path=name), tmp_path)
        == "data.train[0] (a): the dataset is empty; a source needs at least one row"
    )


def test_sources_are_named_after_what_they_read() -> None:
    sources = [
        FileSource(path="data/gsm 8k.jsonl"),
        FileSource(path="data/parts/*.jsonl"),
        HubSource(path="openai/gsm8k-main"),
        ProceduralSource(generator="chain_sum"),
        ProceduralSource(generator="chain_sum", name="long"),
    ]
    assert source_names(sources, key="data.eval") == ["gsm8k", "parts", "gsm8k-main", "chain_sum", "long"]


def test_two_sources_of_one_name_are_refused() -> None:
    sources = [ProceduralSource(generator="gcd"), ProceduralSource(generator="gcd", seed=5)]
    with pytest.raises(
        DataError, match=r"data.eval\[0\] and data.eval\[1\] are both named 'gcd'.*data.eval\[1\].name"
    ):
        source_names(sources, key="data.eval")


def test_a_generator_gives_its_entries_and_how_to_score_them(tmp_path: Path) -> None:
    source = ProceduralSource(generator="chain_sum", params={"max_terms": 2}, size=5, seed=3)
    rows = _read(source, tmp_path)
    assert len(rows) == 5
    assert {"question", "answer", "metadata"} <= rows[0].keys()
    of_scorer = {"generator": "chain_sum", "params": {"max_terms": 2}, "answer": rows[0]["answer"]}
    assert rows[0]["reasoning_gym"] == of_scorer
    shifted = _read(source.model_copy(update={"seed": 4}), tmp_path)
    assert [r["question"] for r in shifted][:-1] == [r["question"] for r in rows][1:]
    assert len(_read(source.model_copy(update={"limit": 2}), tmp_path)) == 2
    assert _read(source.model_copy(update={"skip": 3}), tmp_path) == rows[3:]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ProceduralSource(generator="chain_sums"), "no generator 'chain_sums', did you mean 'chain_sum'?"),
        (ProceduralSource(generator="zzz"), "available: ab, acre"),
        (
            ProceduralSource(generator="chain_sum", params={"max_term": 3}),
            "data.train[0].params: chain_sum has no parameter 'max_term', did you mean 'max_terms'?; "
            "available: min_terms",
        ),
        (
            ProceduralSource(generator="chain_sum", params={"size": 3}),
            "data.train[0].params: set 'size' as data.train[0].size instead",
        ),
        (
            ProceduralSource(generator="chain_sum", params={"min_terms": 9}),
            "chain_sum rejects {'min_terms': 9}: max_terms must be >= min_terms",
        ),
        (ProceduralSource(generator="chain_sum", params={"min_terms": "x"}), "chain_sum rejects {'min_terms': 'x'}"),
    ],
)  # fmt: skip
def test_a_generator_that_cannot_be_created_is_reported(
    tmp_path: Path, source: ProceduralSource, message: str
) -> None:
    assert message in _error(source, tmp_path)


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set" / "data").mkdir(parents=True)
    _write(tmp_path / "set" / "data", "train.jsonl")
    return tmp_path


def test_a_local_folder_is_a_hub_dataset(hub_folder: Path) -> None:
    assert _read(HubSource(path="set"), hub_folder) == ROWS
    assert _read(HubSource(path="set", limit=1), hub_folder) == ROWS[:1]
    assert _read(HubSource(path="set", skip=1, limit=1), hub_folder) == ROWS[1:2]


def test_an_unknown_split_or_dataset_is_reported(hub_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = _error(HubSource(path="set", split="tset"), hub_folder)
    assert "split 'tset'): Unknown split" in message
    assert "data.train[0].split" in message
    assert "cannot load dataset 'a/b' (subset None, split 'train')" in _error(
        HubSource(path="a/b"), hub_folder
    )


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_reading_that_takes_long_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    monkeypatch.setattr(sources, "SLOW_S", seconds)
    caplog.set_level("INFO")
    with sources.said_if_slow("data.train"):
        if not seconds:
            while not caplog.messages:
                time.sleep(0.01)
    said = ["data.train: reading and checking the rows takes more than 0 s"]
    assert caplog.messages == ([] if seconds else said)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
