# ruff: noqa: RUF001  # DeepSeek's tokens contain wide signs
from __future__ import annotations

from typing import Any

import pytest

from braid.models.tool_calls import ToolFormat, parse_calls

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["a"],
        },
    },
}


def _calls(
    text: str, tool_format: ToolFormat = "hermes"
) -> tuple[str, list[tuple[str, dict[str, Any], str]]]:
    rest, calls = parse_calls(text, [TOOL], tool_format, lambda: "id")
    return rest, [(call.name, dict(call.arguments), call.status) for call in calls]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "7"}}\n</tool_call>'),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"note\\": \\"7\\"}"}</tool_call>',
        ),
        (
            "qwen_xml",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n7\n</parameter>\n</function>\n"
            "</tool_call>",
        ),
        (
            "glm",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note</arg_key>\n"
            "<arg_value>7</arg_value>\n</tool_call>",
        ),
        ("llama", '{"name": "add", "parameters": {"a": 1, "note": "7"}}'),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "note": "7"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "note": "7"}, "id": "x"}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "note": "7"}'),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]aB3dE5gH9[ARGS]{"a": 1, "note": "7"}'),
        (
            "deepseek",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "note": "7"}\n```<｜tool▁call▁end｜>',
        ),
        ("pythonic", "<|tool_call_start|>[add(a=1, note='7')]<|tool_call_end|>"),
        (
            "harmony",
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "note": '
            '"7"}<|call|>',
        ),
        ("tag", '<add>{"a": 1, "note": "7"}</add>'),
    ],
)
def test_each_format_reads_its_calls(tool_format: ToolFormat, text: str) -> None:
    if tool_format == "tag":  # one required argument that is no string: a JSON object
        assert _calls(text, tool_format)[1] == [("add", {"a": 1, "note": "7"}, "ok")]
        return
    rest, calls = _calls(text, tool_format)
    assert calls == [("add", {"a": 1, "note": "7"}, "ok")]
    assert "add" not in rest


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"name": "add", "arguments": {"a": }', "bad_json"),
        ("[1, 2]", "not_an_object"),
        ('"add"', "not_an_object"),
        ('{"name": "add", "arguments": [1]}', "not_an_object"),
        ('{"name": "ad", "arguments": {"a": 1}}', "unknown_tool"),
        ('{"name": "add", "arguments": {"a": "one"}}', "bad_arguments"),
        ('{"name": "add", "arguments": {}}', "bad_arguments"),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', "bad_arguments"),
    ],
)
def test_a_mistake_of_the_policy_is_a_status_with_a_text_for_it(body: str, status: str) -> None:
    _, (call,) = parse_calls(f"<tool_call>{body}</tool_call>", [TOOL], "hermes", lambda: "id")
    assert call.status == status
    assert call.error


def test_an_unknown_tool_is_answered_with_the_nearest() -> None:
    _, (call,) = parse_calls('<tool_call>{"name": "ad"}</tool_call>', [TOOL], "hermes", lambda: "id")
    assert call.error == "there is no tool 'ad', did you mean 'add'?; the tools are add"


def test_several_calls_keep_their_order_and_the_text_around_them() -> None:
    one = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    rest, calls = _calls(f"first {one} then {one.replace('1', '2')}")
    assert rest == "first  then"
    assert [arguments for _, arguments, _ in calls] == [{"a": 1}, {"a": 2}]


def test_a_call_that_was_not_closed_is_a_call() -> None:
    assert _calls('<tool_call>{"name": "add", "arguments": {"a": 1}}')[1] == [("add", {"a": 1}, "ok")]
    assert _calls('<tool_call>{"name": "add", "argum')[1] == [("", {}, "bad_json")]


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert parse_calls(text, [], "hermes", lambda: "id") == (text, ())


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 1, "note": "NOTE</tool_call>"}}</tool_call>',
        ),
        (
            "qwen_xml",
            "<tool_call><function=add><parameter=a>1</parameter><parameter=note>NOTE</tool_call></parameter></function>"
            "</tool_call>",
        ),
        (
            "glm",
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>note</arg_key>"
            "<arg_value>NOTE</tool_call></arg_value></tool_call>",
        ),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "note": "NOTE[TOOL_CALLS]"}'),
        (
            "deepseek",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "note": "NOTE<｜tool▁call▁end｜>"}\n```'
            "<｜tool▁call▁end｜>",
        ),
        (
            "pythonic",
            "<|tool_call_start|>[add(a=1, note='NOTE<|tool_call_end|>')]<|tool_call_end|>",
        ),
        ("harmony", 'to=functions.add <|message|>{"a": 1, "note": "NOTE<|call|>"}<|call|>'),
    ],
)
def test_an_end_marker_in_a_string_does_not_cut_the_call(tool_format: ToolFormat, text: str) -> None:
    rest, calls = _calls(f"{text}after" if tool_format != "mistral" else text, tool_format)
    (name, arguments, status) = calls[0]
    assert (len(calls), name, arguments["a"], status) == (1, "add", 1, "ok")
    assert arguments["note"].startswith("NOTE")
    assert len(arguments["note"]) > len("NOTE")
    assert rest == ("" if tool_format == "mistral" else "after")


@pytest.mark.parametrize(
    "cut",
    ['<tool_call>{"name": "add", "arguments": {"note": "</tool_call>', "<tool_call>{'a': \\\"</tool_call>"],
)
def test_a_malformed_call_ends_at_its_first_end_marker(cut: str) -> None:
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert [status for *_, status in _calls(cut + good + 'a "quote"')[1]] == ["bad_json", "ok"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("[add(1)]", "bad_arguments"),
        ("[add(1, note='x')]", "bad_arguments"),
        ("add(*[1])", "bad_arguments"),
        ("add(**{'a': 1}, note='x')", "bad_json"),
        ("add(a={[1]: 2})", "bad_json"),
        ("add(a={1, 2})", "bad_json"),
        ("add(a=b'x')", "bad_json"),
        ("add(a=1j)", "bad_json"),
        ("add(a=" + "-" * 100_000 + "1)", "bad_json"),
        ("add(a=" + "[" * 1_000 + "]" * 1_000 + ")", "bad_json"),
        ("add(a=" + "[" * 150 + "]" * 150 + ")", "bad_json"),
        ("add(a=" + "1+" * 50_000 + "1)", "bad_json"),
        ("a" + ".a" * 50_000 + "()", "bad_json"),
        ("[1, 2]", "bad_json"),
        ("[add(a=1), 2]", "bad_json"),
        ("add(a=1, note=('x', 'y'))", "bad_arguments"),
    ],
)
def test_a_python_call_that_cannot_be_used_is_a_status(body: str, status: str) -> None:
    _, calls = parse_calls(f"<|tool_call_start|>{body}<|tool_call_end|>", [TOOL], "pythonic", lambda: "id")
    assert [call.status for call in calls] == [status]
    assert 0 < len(calls[0].error) < 1_000


@pytest.mark.parametrize("depth", [130, 1_000, 100_000])
@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": DEEP}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "DEEP"}</tool_call>'),
        ("llama", '{"name": "add", "parameters": DEEP}'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": DEEP}'),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\nDEEP<｜tool▁call▁end｜>"),
        ("harmony", "to=functions.add<|message|>DEEP<|call|>"),
        ("pythonic", "<|tool_call_start|>add(a=DEEP)<|tool_call_end|>"),
        ("tag", "<add>DEEP</add>"),
    ],
)
def test_deep_nesting_is_bad_json(tool_format: ToolFormat, text: str, depth: int) -> None:
    assert [
        status for *_, status in _calls(text.replace("DEEP", "[" * depth + "]" * depth), tool_format)[1]
    ] == ["bad_json"]


def test_errors_for_the_policy_stay_short() -> None:
    long = "x" * 1_000_000
    for call in (f'{{"name": "{long}"}}', f'{{"name": "add", "arguments": {{"a": "{long}"}}}}'):
        _, (read,) = parse_calls(f"<tool_call>{call}</tool_call>", [TOOL], "hermes", lambda: "id")
        assert read.status in ("unknown_tool", "bad_arguments")
        assert len(read.error) < 1_000
