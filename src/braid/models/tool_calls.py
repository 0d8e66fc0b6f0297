# ruff: noqa: RUF001  # DeepSeek's tokens contain wide signs
"""Tool calls in a policy's text: the formats of model families, and validation against the tools' schemas."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from braid.errors import suggest
from braid.json_text import parse_json
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
        return parse_json(text)
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
    if (match := _MISTRAL_CALL.match(body)) is not None:
        return [(match[1], _json(match[2]))]
    read = _json(body)
    return [_named(one) for one in (read if isinstance(read, list) else [read])]


def _deepseek(body: str, schemas: Schemas) -> list[_Read]:  # noqa: ARG001
    name, _, arguments = body.removeprefix("function").removeprefix("<｜tool▁sep｜>").partition("\n")
    name, _, inline = name.partition("<｜tool▁sep｜>")
    return [(name.strip(), _json(re.sub(r"^\s*```(?:json)?|```\s*$", "", inline or arguments)))]


def _harmony(body: str, schemas: Schemas) -> list[_Read]:  # noqa: ARG001
    name, _, arguments = body.partition("<|message|>")
    return [(re.split(r"[\s<]", name, maxsplit=1)[0], _json(arguments))]


def _pythonic(body: str, schemas: Schemas) -> list[_Read | _Malformed]:
    """Calls written as a Python list of calls with keyword arguments: [search(query="x"), now()]."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the parser, on the policy's text
            parsed = ast.parse(body.strip(), mode="eval").body
        return [
            _python_call(call, schemas)
            for call in (parsed.elts if isinstance(parsed, ast.List) else [parsed])
        ]
    except (
        SyntaxError,
        ValueError,
        TypeError,
        RecursionError,
        MemoryError,
    ) as error:  # MemoryError: nested too deeply
        why = str(error) or "nested too deeply"
        raise _Malformed("bad_json", f"the tool call is not a list of Python calls: {why}") from error


def _python_call(call: ast.expr, schemas: Schemas) -> _Read | _Malformed:
    if not isinstance(call, ast.Call):
        raise ValueError("an entry is no call")
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("** is not supported; write arguments as name=value")
    name = ast.unparse(call.func)
    if call.args:
        first = next(iter(schemas.get(name, {}).get("properties", {})), "name")
        return _Malformed(
            "bad_arguments",
            f"wrong arguments of {_shown(name)}: a positional argument; write arguments as name=value, such "
            f"as {first}=...",
        )
    values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return name, parse_json(
        json.dumps(values)
    )  # tuples become lists; sets, bytes and the like raise TypeError


def _xml(body: str, schemas: Schemas) -> list[_Read]:
    header = re.match(r"<function=([^<>\n]+)>", body)
    if header is None:
        raise _Malformed("bad_json", "the tool call has no <function=name>")
    closed = body[: body.rfind("</parameter>") + len("</parameter>")]
    pairs = re.findall(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", closed, re.DOTALL)
    return [(header[1], _typed(pairs, schemas.get(header[1], {})))]


def _glm(body: str, schemas: Schemas) -> list[_Read]:
    name = re.split(r"\n|<arg_key>", body, maxsplit=1)[0].strip()
    closed = body[: body.rfind("</arg_value>") + len("</arg_value>")]
    pairs = re.findall(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", closed, re.DOTALL)
    return [(name, _typed(pairs, schemas.get(name, {})))]


def _typed(pairs: Sequence[tuple[str, str]], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments written as text: those whose schema is not a string's are read as JSON where they can be."""
    out: dict[str, Any] = {}
    for key, text in pairs:
        is_text = schema.get("properties", {}).get(key, {}).get("type") == "string"
        try:
            out[key] = text if is_text else parse_json(text)
        except ValueError:
            out[key] = text
    return out


@dataclass(frozen=True, slots=True)
class _Format:
    """How a model family writes calls: patterns of a call's start and end, and the function that reads the
    body between them. An end marker within `quoted`, a string of the body, does not end the call."""

    start: str
    end: str
    read: Callable[[str, Schemas], Sequence[_Read | _Malformed]]
    quoted: str = r'"[^"\\]*(?:\\.[^"\\]*)*"'
    unquoted: str = r'["\\]'
    """What is malformed outside of strings."""

    def tokens(self) -> re.Pattern[str]:
        """Strings, the end of a call, and what shows that the call is malformed."""
        return re.compile(
            f"{self.quoted}|(?P<end>{self.end})|(?P<stop>{self.unquoted}|{self.start})", re.DOTALL
        )


def _tagged(name: str) -> tuple[str, str]:
    """`quoted` and `unquoted` of values between tags."""
    start = f"<{name}[=>]"
    return rf"{start}(?:(?!{start}).)*?</{name}>", start


_FORMATS: dict[ToolFormat, _Format] = {
    "hermes": _Format(r"<tool_call>", r"</tool_call>", _hermes),
    "qwen_xml": _Format(r"<tool_call>", r"</tool_call>", _xml, *_tagged("parameter")),
    "glm": _Format(r"<tool_call>", r"</tool_call>", _glm, *_tagged("arg_value")),
    "llama": _Format(r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*\"name\")", r"\Z", _llama),
    "pythonic": _Format(
        r"<\|tool_call_start\|>",
        r"<\|tool_call_end\|>",
        _pythonic,
        r'"[^"\\]*(?:\\.[^"\\]*)*"|\'[^\'\\]*(?:\\.[^\'\\]*)*\'',
        r"[\"'\\]",
    ),
    "mistral": _Format(r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\])", _mistral),
    "deepseek": _Format(
        r"<｜tool▁call▁begin｜>", r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?", _deepseek
    ),
    "harmony": _Format(r"to=functions\.", r"<\|call\|>", _harmony),
}
"""`tag` is treated apart: its pattern depends on the tools."""
_MISTRAL_CALL = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(\{.*)", re.DOTALL)
_SHOWN_CHARACTERS = 200
"""Length to which the policy's text is quoted in errors."""

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
    text: str, tools: Sequence[ToolSchema], tool_format: ToolFormat, new_id: Callable[[], str]
) -> tuple[str, tuple[ToolCall, ...]]:
    """The text around the calls, and the calls in order, each with its status. Without tools nothing is a
    call.

    `tag` is for models without a chat template: `<calculator>12*7</calculator>` calls a tool that has one
    required string argument, or gives its arguments as a JSON object.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    if not schemas:
        return text, ()
    calls: list[ToolCall] = []
    rest, end = list[str](), 0
    for start, stop, name, read in _found(text, schemas, tool_format):
        rest.append(text[end:start])
        calls += (_checked(one, name, schemas, new_id()) for one in read)
        end = stop
    return ("".join([*rest, text[end:]]).strip() if calls else text), tuple(calls)


def _found(
    text: str, schemas: Schemas, tool_format: ToolFormat
) -> Iterator[tuple[int, int, str, Sequence[_Read | _Malformed]]]:
    """Start, end, name if known, and content of each call; a list in mistral's format has several."""
    if tool_format == "tag":
        names = "|".join(re.escape(name) for name in schemas)
        for match in re.finditer(rf"<({names})>(.*?)(?:</\1>|\Z)", text, re.DOTALL):
            yield (
                match.start(),
                match.end(),
                match[1],
                [(match[1], _tag_arguments(match[2], schemas[match[1]]))],
            )
        return
    form, end = _FORMATS[tool_format], 0
    opening, ending, tokens = re.compile(form.start), re.compile(f"{form.end}|\\Z"), form.tokens()
    while (start := opening.search(text, end)) is not None:
        first = ending.search(text, start.end())
        assert first is not None, "the end of the text matches"
        read: Sequence[_Read | _Malformed] = []
        for stop, after in filter(None, (_end(text, start.end(), tokens), first.span())):
            end = after
            try:
                read = form.read(text[start.end() : stop].strip(), schemas)
                break
            except _Malformed as problem:
                read = [problem]
        yield start.start(), end, "", read


def _end(text: str, start: int, tokens: re.Pattern[str]) -> tuple[int, int] | None:
    """Where the call whose body begins at `start` ends, and where the text goes on, passing over end markers
    in strings; None if the body is malformed."""
    for token in tokens.finditer(text, start):
        if token.lastgroup is not None:
            return token.span() if token.lastgroup == "end" else None
    return len(text), len(text)


def _tag_arguments(text: str, schema: Mapping[str, Any]) -> Any:
    required = schema.get("required", [])
    if len(required) == 1 and schema.get("properties", {}).get(required[0], {}).get("type") == "string":
        return {required[0]: text}
    return text


def _checked(read: _Read | _Malformed, name: str, schemas: Schemas, id: str) -> ToolCall:
    if isinstance(read, _Malformed):
        return ToolCall(name, {}, id, read.status, str(read))
    name, arguments = read
    if name not in schemas:
        name = name.encode(errors="replace").decode()  # JSON can contain lone surrogates
        near = suggest(name[:_SHOWN_CHARACTERS], schemas)
        known = ", ".join(schemas)
        return ToolCall(
            name, {}, id, "unknown_tool", f"there is no tool {_shown(name)!r}{near}; the tools are {known}"
        )
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            return ToolCall(name, {}, id, "bad_json", f"the arguments of {name} are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return ToolCall(
            name, {}, id, "not_an_object", f"the arguments of {name} must be a JSON object, not {kind}"
        )
    why = _wrong(arguments, schemas[name])
    if why is None:
        return ToolCall(name, arguments, id)
    return ToolCall(name, arguments, id, "bad_arguments", f"wrong arguments of {name}: {_shown(why)}")


def _wrong(arguments: dict[str, Any], schema: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments; None if they fit the schema."""
    from jsonschema import Draft202012Validator  # imported here, because most runs have no tools

    try:
        problem = next(iter(Draft202012Validator(schema).iter_errors(arguments)), None)
    except (RecursionError, ArithmeticError, ValueError) as error:  # deep nesting, numbers outside of floats
        return f"the tool's schema cannot be applied to them ({type(error).__name__})"
    if problem is not None:
        return problem.message
    unknown = sorted(arguments.keys() - schema.get("properties", arguments).keys())
    return f"unknown argument {unknown[0]!r}" if unknown else None


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
