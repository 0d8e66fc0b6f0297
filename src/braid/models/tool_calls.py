# ruff: noqa: RUF001  # DeepSeek's tokens contain wide signs
"""Tool calls in a policy's text: the formats of model families, and validation against the tools' schemas."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jsonschema import Draft202012Validator

from braid.errors import suggest
from braid.types import CallStatus, ToolCall

ToolSchema = Mapping[str, Any]
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments, by the tool's name."""
ToolFormat = Literal[
    "hermes", "qwen_xml", "glm", "llama", "mistral", "deepseek", "pythonic", "harmony", "tag"
]


class _Malformed(ValueError):
    """A call that cannot be read; carries its status."""

    def __init__(self, status: CallStatus, problem: str) -> None:
        super().__init__(problem)
        self.status: CallStatus = status


_Read = tuple[str, Any]
"""Name and arguments of a call, before validation."""


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _Malformed("bad_json", f"the tool call is not valid JSON: {error}") from error


def _named(value: Any, arguments: str = "arguments") -> _Read:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise _Malformed(
            "not_an_object", f"a tool call must be a JSON object with name and {arguments}, not {kind}"
        )
    if not isinstance(value.get("name"), str):
        raise _Malformed("not_an_object", "the tool call has no name")
    return value["name"], value.get(arguments, {})


def _hermes(body: str, schemas: Schemas) -> list[_Read]:  # noqa: ARG001
    return [_named(_json(body))]


def _llama(body: str, schemas: Schemas) -> list[_Read]:  # noqa: ARG001
    return [_named(_json(body), "parameters")]


def _mistral(body: str, schemas: Schemas) -> list[_Read]:  # noqa: ARG001
    if (found := re.match(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*)", body, re.DOTALL)) is not None:
        return [(found[1], _json(found[2]))]
    read = _json(body)
    return [_named(one) for one in (read if isinstance(read, list) else [read])]


def _deepseek(body: str, schemas: Schemas) -> list[_Read]:  # noqa: ARG001
    name, _, arguments = body.removeprefix("function").removeprefix("<｜tool▁sep｜>").partition("\n")
    name, _, inline = name.partition("<｜tool▁sep｜>")
    return [(name.strip(), _json(re.sub(r"^\s*```(?:json)?|```\s*$", "", inline or arguments)))]


def _harmony(body: str, schemas: Schemas) -> list[_Read]:  # noqa: ARG001
    name, _, arguments = body.partition("<|message|>")
    return [(re.split(r"[\s<]", name, maxsplit=1)[0], _json(arguments))]


def _pythonic(body: str, schemas: Schemas) -> list[_Read]:  # noqa: ARG001
    """Calls written as a Python list of calls with keyword arguments: [search(query="x"), now()]."""
    try:
        calls = ast.parse(body.strip(), mode="eval").body
        listed = calls.elts if isinstance(calls, ast.List) else [calls]
        return [
            (ast.unparse(call.func), {k.arg: ast.literal_eval(k.value) for k in call.keywords})
            for call in listed
            if isinstance(call, ast.Call)
        ]
    except (SyntaxError, ValueError) as error:
        raise _Malformed("bad_json", f"the tool call is not a list of Python calls: {error}") from error


def _xml(body: str, schemas: Schemas) -> list[_Read]:
    found = re.match(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?$", body, re.DOTALL)
    if found is None:
        raise _Malformed("bad_json", "the tool call has no <function=name>")
    pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL)
    return [(found[1], _typed(pairs, schemas.get(found[1], {})))]


def _glm(body: str, schemas: Schemas) -> list[_Read]:
    name = re.split(r"\n|<arg_key>", body.strip(), maxsplit=1)[0].strip()
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
    return [(name, _typed(pairs, schemas.get(name, {})))]


def _typed(pairs: Sequence[tuple[str, str]], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments written as text: those whose schema is not a string's are read as JSON where they can be."""
    out: dict[str, Any] = {}
    for key, text in pairs:
        is_text = schema.get("properties", {}).get(key, {}).get("type") == "string"
        try:
            out[key] = text if is_text else json.loads(text)
        except ValueError:
            out[key] = text
    return out


_FORMATS: dict[ToolFormat, tuple[str, Callable[[str, Schemas], list[_Read]]]] = {
    "hermes": (r"<tool_call>\s*(?P<body>.*?)\s*(?:</tool_call>|\Z)", _hermes),
    "qwen_xml": (r"<tool_call>\s*(?P<body>.*?)\s*(?:</tool_call>|\Z)", _xml),
    "glm": (r"<tool_call>\s*(?P<body>.*?)\s*(?:</tool_call>|\Z)", _glm),
    "llama": (r"\A\s*(?:<\|python_tag\|>)?\s*(?P<body>\{\s*\"name\".*)\Z", _llama),
    "pythonic": (r"<\|tool_call_start\|>(?P<body>.*?)(?:<\|tool_call_end\|>|\Z)", _pythonic),
    "mistral": (r"\[TOOL_CALLS\]\s*(?P<body>.*?)(?=\[TOOL_CALLS\]|\Z)", _mistral),
    "deepseek": (
        r"<｜tool▁call▁begin｜>(?P<body>.*?)(?:<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?|\Z)",
        _deepseek,
    ),
    "harmony": (r"to=functions\.(?P<body>.*?)(?:<\|call\|>|\Z)", _harmony),
}
"""Pattern of a call, with its body, and the function that reads the body. `tag` is treated apart: its pattern depends
on the tools."""

_DETECTED: tuple[tuple[str, ToolFormat], ...] = (
    ("<function=", "qwen_xml"),
    ("<arg_key>", "glm"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_list_start|>", "pythonic"),
    ("<|channel|>", "harmony"),
    ("<tool_call>", "hermes"),
    ('"parameters": ', "llama"),
)


def detect_format(template: str | None) -> ToolFormat | None:
    """The format of tool calls that a chat template writes; "tag" without one, None if it writes none."""
    if template is None:
        return "tag"
    return next((name for marker, name in _DETECTED if marker in template), None)


def parse_calls(
    text: str, tools: Sequence[ToolSchema], of: ToolFormat, new_id: Callable[[], str]
) -> tuple[str, tuple[ToolCall, ...]]:
    """The text around the calls, and the calls in order, each with its status. Without tools nothing is a call.

    `tag` is for models without a chat template: `<calculator>12*7</calculator>` calls a tool that has one required
    string argument, or gives its arguments as a JSON object.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    if not schemas:
        return text, ()
    calls: list[ToolCall] = []
    rest, end = "", 0
    for start, stop, name, read in _found(text, schemas, of):
        rest, end = rest + text[end:start], stop
        calls += (_checked(one, name, schemas, new_id()) for one in read)
    return (rest + text[end:]).strip() if calls else text, tuple(calls)


def _found(
    text: str, schemas: Schemas, of: ToolFormat
) -> Iterator[tuple[int, int, str, Sequence[_Read | _Malformed]]]:
    """Start, end, name if known, and content of each call; a list in mistral's format has several."""
    if of == "tag":
        names = "|".join(re.escape(name) for name in schemas)
        for match in re.finditer(rf"<({names})>(.*?)(?:</\1>|\Z)", text, re.DOTALL):
            yield (
                match.start(),
                match.end(),
                match[1],
                [(match[1], _tag_arguments(match[2], schemas[match[1]]))],
            )
        return
    pattern, reader = _FORMATS[of]
    for match in re.finditer(pattern, text, re.DOTALL):
        try:
            read: Sequence[_Read | _Malformed] = reader(match["body"], schemas)
        except _Malformed as problem:
            read = [problem]
        yield match.start(), match.end(), "", read


def _tag_arguments(text: str, schema: Mapping[str, Any]) -> Any:
    required = schema.get("required", [])
    if len(required) == 1 and schema["properties"][required[0]].get("type") == "string":
        return {required[0]: text}
    try:
        return json.loads(text)
    except ValueError:
        return text


def _checked(read: _Read | _Malformed, name: str, schemas: Schemas, id: str) -> ToolCall:
    if isinstance(read, _Malformed):
        return ToolCall(name, {}, id, read.status, str(read))
    name, arguments = read
    if name not in schemas:
        near = suggest(name, schemas)
        return ToolCall(
            name,
            {},
            id,
            "unknown_tool",
            f"there is no tool {name!r}{near}; the tools are {', '.join(schemas)}",
        )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return ToolCall(name, {}, id, "bad_json", f"the arguments of {name} are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return ToolCall(
            name, {}, id, "not_an_object", f"the arguments of {name} must be a JSON object, not {kind}"
        )
    problem = next(iter(Draft202012Validator(schemas[name]).iter_errors(arguments)), None)
    unknown = sorted(arguments.keys() - schemas[name].get("properties", arguments).keys())
    if problem is None and not unknown:
        return ToolCall(name, arguments, id)
    why = f"unknown argument {unknown[0]!r}" if problem is None else problem.message
    return ToolCall(name, arguments, id, "bad_arguments", f"wrong arguments of {name}: {why}")
