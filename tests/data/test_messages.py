"""Conversations to imitate are the same from JSON and Parquet, and in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from braid.config.data import DataConfig, FileSource
from braid.data.messages import read_messages, read_tools
from braid.data.worked import load_examples
from braid.errors import DataError
from braid.models.chat import ChatFormat
from braid.types import Placed

from .test_worked import END_OF_TURN


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"{name}s", "parameters": parameters},
    }


TOOLS = [
    _tool("search", query={"type": "string"}, limit={"type": ["integer", "null"]}),
    _tool("add", a={"type": "number", "enum": [1, 2]}, b={"type": "number"}),
]


def _row(name: str, arguments: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    written: Any = json.dumps(arguments) if as_text else arguments
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": written}}
    return {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": name},
            {"role": "assistant", "content": "done", "weight": 1},
        ],
    }


ROWS = {
    as_text: [_row("search", {"query": "x"}, as_text=as_text), _row("add", {"a": 1, "b": 2}, as_text=as_text)]
    for as_text in (False, True)
}


def _seen(folder: Path, tokenizer: PreTrainedTokenizerFast, path: str) -> list[Any]:
    conversations: list[Any] = []

    def conversation(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[tuple[list[int], list[int], list[bool], tuple[Placed, ...]]]:
        conversations.append(json.loads(json.dumps([messages, tools])))
        return [([1], [2], [True], ())]

    source = FileSource(path=path, messages_key="messages", tools_key="tools")
    loaded = load_examples([source], DataConfig(), tokenizer, base_dir=folder, conversation=conversation)
    assert len(loaded.examples) == 2
    return conversations[:2]


@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "text"])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_all_forms_of_a_conversation_are_the_same(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, form: str, as_text: bool
) -> None:
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS[as_text])))
    else:
        table = pa.Table.from_pylist(ROWS[as_text])
        pq.write_table(table, path)
        if (
            not as_text
        ):  # Parquet fills in the keys of the other row's arguments, and of the other tool's properties
            assert "'a': None" in str(table.to_pylist()[0])
    expected = []
    for row in ROWS[False]:
        messages = row["messages"]
        expected.append([messages, TOOLS])
    assert _seen(tmp_path, tokenizer, path.name) == expected


def test_a_null_stays_where_the_schema_or_json_text_has_it() -> None:
    def arguments(value: Any) -> Any:
        row = _row("search", {}, as_text=False)["messages"]
        row[1]["tool_calls"][0]["function"]["arguments"] = value
        return read_messages(row, TOOLS)[1]["tool_calls"][0]["function"]["arguments"]

    assert arguments({"query": None, "limit": None, "a": None}) == {"limit": None}
    assert arguments('{"query": null}') == {"query": None}
    assert arguments("") == arguments(None) == {}
    assert arguments({"query": {"deep": None, "x": [{"y": None, "z": 1}]}}) == {"query": {"x": [{"z": 1}]}}


def test_tools_may_be_json_text() -> None:
    parameters = TOOLS[0]["function"]["parameters"]
    as_text = {"type": "function", "function": TOOLS[0]["function"] | {"parameters": json.dumps(parameters)}}
    assert read_tools([json.dumps(TOOLS[0]), as_text]) == [TOOLS[0], TOOLS[0]]
    assert read_tools(None) == []


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": "3"}, r"message 2 is .*, which has no role"),
        ({"role": None, "content": "3"}, r"message 2 is .*, which has no role"),
        ("3", r"message 2 is '3', which has no role"),
        ({"role": "assistant", "content": None}, r"message 2 is .*, which has no content"),
        ({"role": "assistant", "content": "3", "weight": 0.5}, r"message 2 has the weight 0\.5; use 1, or 0"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, r"message 2 has the tool call \{'id': '1'\}"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]},
            r"message 2 calls f with '\{a', which is not a JSON object",
        ),
        ({"role": "assistant", "content": "3", "weight": 0}, r"whose weight is not 0"),
    ],
)
def test_a_message_that_is_none_is_refused_with_its_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, message: Any, why: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "1"}, message]}))
    with pytest.raises(DataError, match=rf"row 0: column 'messages'.*{why}"):
        load_examples(
            [FileSource(path="a.jsonl", messages_key="messages")], DataConfig(), tokenizer, base_dir=tmp_path,
            conversation=lambda *_: [([1], [2], [True], ())],
        )  # fmt: skip


def test_an_answer_of_weight_0_is_read_and_not_imitated(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ m.weight }}~{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    chat = ChatFormat(chat_tokenizer, end_token_ids=[END_OF_TURN])
    said = [("user", "1+2="), ("assistant", "3"), ("user", "+4="), ("assistant", "7")]
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in said]
    (whole,) = chat.examples(messages)
    assert whole[2] == [True, True, *[False] * 6, True, True]
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    assert chat.examples(messages) == [(whole[0], whole[1], [*[False] * 8, True, True], ())]
