"""Conversations in data rows, in one form whether they come from JSON or from Parquet.

Parquet, and data sets of the hub, give all messages of a column the same keys, with null for those that a
message lacks, down to the arguments of tool calls and the schemas of tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .columns import parse_json

RULE = (
    "a conversation must be a list of messages {role, content}, with an answer of role assistant after "
    "the first, whose weight is not 0"
)


def read_messages(messages: Any, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a conversation without keys that are null, and with the arguments of tool calls as
    mappings: OpenAI's format has them as JSON text. Raises ValueError, with the number of the message, for
    one that is none."""
    if not isinstance(messages, list):
        raise ValueError(f"{messages!r:.200}; {RULE}")
    schemas = {
        function["name"]: function.get("parameters") or {} for tool in tools if (function := _function(tool))
    }
    made: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"message {i + 1} is {message!r:.200}, which has no role; write {{role: user, content: ...}}"
            )
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise ValueError(
                f"message {i + 1} has the weight {weight!r}; use 1, or 0 for an answer that is not to be "
                "imitated"
            )
        clean: dict[str, Any] = without_nulls(
            {key: value for key, value in message.items() if key != "tool_calls"}
        )
        if calls := message.get("tool_calls"):
            clean.setdefault("content", None)  # as OpenAI writes it; some templates ask whether it is none
            clean["tool_calls"] = [_call(call, schemas, i + 1) for call in calls]
        elif "content" not in clean:
            raise ValueError(f"message {i + 1} is {message!r:.200}, which has no content")
        made.append(clean)
    return made


def read_tools(tools: Any) -> list[Any]:
    """The schemas of tools without keys that are null; each may be JSON text, as may its parameters."""
    made: list[Any] = []
    for tool in tools or ():
        schema = without_nulls(parse_json(tool) if isinstance(tool, str) else tool)
        if (function := _function(schema)) and isinstance(text := function.get("parameters"), str):
            function["parameters"] = parse_json(text)
        made.append(schema)
    return made


def without_nulls(value: Any) -> Any:
    """The value without keys of mappings, at any depth, that are null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _function(tool: Any) -> Any:
    """The part of a tool or a call with its name; None if it has no name."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def _call(call: Any, schemas: Mapping[str, Any], number: int) -> Any:
    """A tool call with its arguments as a mapping. A null stays if it was written in JSON text, or if the
    tool's schema allows it there."""
    function = _function(call)
    if function is None:
        raise ValueError(
            f"message {number} has the tool call {call!r:.200}; write {{function: {{name, arguments}}}}"
        )
    written = function.get("arguments")
    arguments = parse_json(written) if isinstance(written, str) else written
    if written in (None, ""):
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(
            f"message {number} calls {function['name']} with {written!r:.200}, which is not a JSON object"
        )
    if not isinstance(written, str):
        properties = schemas.get(function["name"], {}).get("properties") or {}
        arguments = {
            key: without_nulls(item)
            for key, item in arguments.items()
            if item is not None or _allows_null(properties.get(key))
        }
    clean = without_nulls({key: value for key, value in call.items() if key not in ("function", "arguments")})
    named = without_nulls({key: value for key, value in function.items() if key != "arguments"})
    if function is call:
        return {**named, "arguments": arguments}
    return {**clean, "function": {**named, "arguments": arguments}}


def _allows_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    options = (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ()))
    return "null" in (kinds if isinstance(kinds, list) else [kinds]) or any(map(_allows_null, options))
