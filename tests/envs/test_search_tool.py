from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.envs.playing import call, said
from tests.needs import needs

from braid.envs.agents.toolboxes import ToolEnvs
from braid.envs.kinds import ToolsEnv
from braid.errors import ConfigError, DataError

pytestmark = needs("bm25s")

DOCUMENTS = [
    {"id": "a", "title": "France", "text": "The capital of France is Paris."},
    {"id": "b", "title": "Germany", "text": "The capital of Germany is Berlin."},
    {"id": 3, "title": "", "text": "A cat sat on a mat in Paris, Paris and Paris."},
    {"text": "Berlin has 3 airports: é."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = "\n".join(json.dumps(document) for document in DOCUMENTS)
    (tmp_path / "docs.jsonl").write_text(lines + "\n\n", encoding="utf-8")
    return tmp_path


def _search(folder: Path, **arguments: object) -> str:
    env = ToolEnvs(ToolsEnv(kind="tools", tools=({"index": "docs.jsonl"},)), folder)()  # pyright: ignore[reportArgumentType]
    return said(env, call("search", **arguments))[0]


def test_documents_are_ranked(folder: Path) -> None:
    assert _search(folder, query="capital of france", num_results=2) == (
        "[1] France\nThe capital of France is Paris.\n\n[2] Germany\nThe capital of Germany is Berlin."
    )
    assert _search(folder, query="cats on the mat") == "[1] 3\nA cat sat on a mat in Paris, Paris and Paris."


@pytest.mark.parametrize("query", ["", "the", "zebra", "?!", "\ud800"])
def test_a_query_without_matches_has_no_results(folder: Path, query: str) -> None:
    assert _search(folder, query=query) == "no results"


@pytest.mark.parametrize(("asked", "num_found"), [(-1, 1), (0, 1), (2, 2), (10**9, 2)])
def test_the_number_of_results_is_bounded(folder: Path, asked: int, num_found: int) -> None:
    assert _search(folder, query="Berlin", num_results=asked).count("[") == num_found


@pytest.mark.parametrize(
    ("line", "problem"),
    [("{", r"docs.jsonl:2: "), ("[1]", "docs.jsonl:2: not an object"), ('{"id": 1}', "a string `text`")],
)
def test_a_malformed_document_is_named(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "docs.jsonl").write_text(f'{{"text": "x"}}\n{line}\n')
    with pytest.raises(DataError, match=problem):
        _search(tmp_path, query="x")


def test_an_empty_or_missing_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.tools\[0\].index: no such file"):
        _search(tmp_path, query="x")
    (tmp_path / "docs.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no documents"):
        _search(tmp_path, query="x")
