"""OpenAI's Responses: a request becomes one of chat completions, the answer the items of a response.

No response is kept for later requests: each brings its whole conversation, as with chat completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel

from .chat_api import ChatRequest, RequestError, as_text, read, read_value


class _Request(BaseModel, extra="allow"):
    """What differs from chat completions, whose options the others are."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    include: Any = None


def read_response(body: bytes) -> ChatRequest:
    """Read the body of a request. Raises RequestError."""
    asked = read(_Request, body)
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    system = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    read_here = {
        "messages": [*system, *_messages(items)],
        "tools": asked.tools and [{"type": tool.pop("type", None), "function": tool} for tool in asked.tools],
        "tool_choice": asked.tool_choice
        if isinstance(asked.tool_choice, str | None)
        else _nested(asked.tool_choice),
        "max_tokens": asked.max_output_tokens,
        "response_format": (asked.text or {}).get("format"),
    }
    return read_value(ChatRequest, {**(asked.model_extra or {}), **read_here})


def _nested(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": choice.get("type"), "function": choice}


def _messages(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages of a conversation; reasoning, text and calls that follow each other are one turn of the
    policy."""
    turn: dict[str, Any] = {}
    for item in items:
        kind, content = item.get("type", "message"), item.get("content")
        is_own = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        if is_own:
            turn = turn or {"role": "assistant", "content": ""}
        elif turn:
            yield turn
            turn = {}
        match kind:
            case "message" if is_own:
                turn["content"] += as_text(content)
            case "message":
                yield {"role": item.get("role"), "content": content}
            case "function_call":
                turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": item})
            case "function_call_output":
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            case "reasoning":
                turn["reasoning_content"] = as_text(content)
            case _:
                raise RequestError(400, f"input of the type {kind!r} is not supported here", param="input")
    if turn:
        yield turn


def as_response(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer of chat completions as a response."""
    (choice,) = answer["choices"]
    message, usage, is_cut = choice["message"], answer["usage"], choice["finish_reason"] == "length"
    name = answer["id"].removeprefix("chatcmpl-")
    output: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    if message["content"] is not None:
        content = [{"type": "output_text", "text": message["content"], "annotations": []}]
        output.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": content})
    for call in message.get("tool_calls", ()):
        ids = {"id": f"fc_{name}_{call['id']}", "call_id": call["id"]}
        output.append({"type": "function_call", **ids, **call["function"]})
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": answer["created"],
        "model": answer["model"],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": [{**item, "status": "completed"} for item in output],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def as_events(answer: Mapping[str, Any], _: ChatRequest) -> Iterator[dict[str, Any]]:
    """An answer of chat completions as the events of a streamed response."""
    for number, event in enumerate(_events(as_response(answer))):
        yield event | {"sequence_number": number}


def _events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {
        "type": "response.created",
        "response": response | {"status": "in_progress", "output": [], "usage": None},
    }
    for index, item in enumerate(response["output"]):
        is_call = item["type"] == "function_call"
        begun = {"status": "in_progress", **({"arguments": ""} if is_call else {"content": []})}
        yield {"type": "response.output_item.added", "output_index": index, "item": item | begun}
        at: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if is_call:
            kind, text, key = "function_call_arguments", item["arguments"], "arguments"
        else:
            (part,) = item["content"]
            kind, text, key = part["type"], part["text"], "text"
            at["content_index"] = 0
            yield at | {"type": "response.content_part.added", "part": part | {"text": ""}}
        yield at | {"type": f"response.{kind}.delta", "delta": text}
        yield at | {"type": f"response.{kind}.done", key: text} | ({"name": item["name"]} if is_call else {})
        if not is_call:
            yield at | {"type": "response.content_part.done", "part": item["content"][0]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
