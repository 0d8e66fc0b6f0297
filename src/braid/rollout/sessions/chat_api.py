"""OpenAI's chat completions: requests are read and checked, answers written.

The run decides how tokens are sampled, since training needs the log-probs of that distribution. Other
sampling options of a request are ignored with a warning; options that change the form of the answer are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, Field, PositiveInt, ValidationError, model_validator

from braid.errors import RewardError
from braid.json_text import parse_json
from braid.models.chat import ToolSchema
from braid.rewards.scorer import as_score
from braid.types import Action, Message
from braid.users import described, encodable_texts

_TYPES = {401: "authentication_error", 409: "conflict_error", 500: "server_error", 503: "server_error"}
_PARTS = ("text", "input_text", "output_text", "reasoning_text")

M = TypeVar("M", bound=BaseModel)


class RequestError(Exception):
    """A request that is refused, with its HTTP status; `code` and `param` as in OpenAI's errors."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = _TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_text(content: Any) -> Any:
    """The content of a message, which may come in parts."""
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") in _PARTS for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    if content is None or isinstance(content, str):
        return content or ""
    raise ValueError("only text is supported, without images, audio and files")


def _arguments(arguments: Any) -> Any:
    """Arguments of a tool call as chat templates take them, as an object if they are one."""
    try:
        parsed = parse_json(arguments)
    except (TypeError, ValueError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _role(role: Any) -> Any:
    return "system" if role == "developer" else role


class _Function(BaseModel):
    name: str
    arguments: Annotated[Any, BeforeValidator(_arguments)] = ""


class _ToolCall(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(as_text)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


def _function(function: Any) -> Any:
    """A tool's schema that reads calls of it: a name, and a JSON schema of its parameters."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("a function needs a name")
    from jsonschema import Draft202012Validator, SchemaError  # imported here, because most runs have no tools

    parameters = function.get("parameters")
    if parameters is None:
        function.pop("parameters", None)
        return function
    try:
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise ValueError("not of the type object")
        Draft202012Validator.check_schema(parameters)
    except Exception as error:  # of a schema of any form
        message = error.message if isinstance(error, SchemaError) else described(error)
        raise ValueError(f"parameters of {function['name']!r} are no JSON schema: {message}") from error
    return function


class _Tool(BaseModel, extra="allow"):
    type: Literal["function"]
    function: Annotated[dict[str, Any], BeforeValidator(_function)]


class _NamedFunction(BaseModel):
    name: str


class _NamedTool(BaseModel):
    type: Literal["function"]
    function: _NamedFunction


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _TextFormat(BaseModel):
    type: Literal["text"]


class ChatRequest(BaseModel, extra="allow"):
    """A request to continue a conversation. Options that are not listed here have no effect."""

    model: str = "policy"
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    seed: None = None
    response_format: _TextFormat | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    functions: None = None
    audio: None = None
    user: Any = None
    metadata: Any = None
    store: Any = None

    @model_validator(mode="after")
    def _required_exist(self) -> ChatRequest:
        names = {tool.function.get("name") for tool in self.tools or []}
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice=required needs tools")
        if isinstance(self.tool_choice, _NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(
                f"tool_choice names {self.tool_choice.function.name!r}, which is none of the tools"
            )
        return self

    def lacks_call(self, action: Action) -> bool:
        """Whether a turn has no valid call of a tool that `tool_choice` demands. Sampling is not constrained
        to one."""
        called = {call.name for call in action.tool_calls if call.status == "ok"}
        if isinstance(self.tool_choice, _NamedTool):
            return self.tool_choice.function.name not in called
        return self.tool_choice == "required" and not called

    def conversation(self) -> tuple[list[Message], list[ToolSchema]]:
        """Messages and tools as chat templates take them."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return list(map(_plain, self.messages)), [tool.model_dump() for tool in tools]

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class PostedReward(BaseModel):
    """The body of POST /v1/reward."""

    reward: Any


def read(kind: type[M], body: bytes) -> M:
    """Read the body of a request. Raises RequestError."""
    try:
        value = encodable_texts(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON that can be read: {error}") from error
    return _checked(lambda: kind.model_validate(value))


def read_value(kind: type[M], value: Mapping[str, Any]) -> M:
    """Read a request that is plain data already. Raises RequestError."""
    return _checked(lambda: kind.model_validate(value))


def _checked(reads: Callable[[], M]) -> M:
    try:
        return reads()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, first["loc"]))
        got = json.dumps(first["input"], default=str)[:100] if param else "the body"
        problem = f"{param}={got}" if param else got
        raise RequestError(400, f"{problem} is not supported here: {first['msg']}", param=param) from error


def read_reward(value: object) -> float | dict[str, float]:
    """A reward, or several by name, whose sum is the reward. Raises RequestError unless all are finite
    numbers."""
    try:
        if isinstance(value, Mapping):
            return {str(name): as_score(one) for name, one in value.items()}
        return as_score(value)
    except RewardError as error:
        raise RequestError(400, f"reward: {error}", param="reward") from error


def _plain(message: _Message) -> Message:
    return cast(
        "Message", {k: v for k, v in message.model_dump(exclude_none=True).items() if v or k == "content"}
    )


def fingerprints(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[bytes]:
    """A hash of the conversation after each message, [len(messages) + 1]."""
    hashes = [_digest(b"", tools)]
    for message in messages:
        hashes.append(_with(hashes[-1], message))
    return hashes


def answered(before: bytes, answer: Mapping[str, Any]) -> bytes:
    """The hash of a conversation that goes on with an answer."""
    return _with(before, _plain(_Message.model_validate(answer)))


def _with(before: bytes, message: Message) -> bytes:
    """Messages of the assistant are the same if their tool calls are, and their text but for white space
    around it."""
    said = {k: v for k, v in message.items() if k != "reasoning_content"}
    if message["role"] == "assistant":
        said["content"] = message["content"].strip()
    return _digest(before, said)


def _digest(before: bytes, value: Any) -> bytes:
    return sha256(before + json.dumps(value, sort_keys=True).encode()).digest()


def message_of(action: Action, stops: Sequence[str] = ()) -> dict[str, Any]:
    """The policy's turn as a message, cut before the first of the request's stop strings. Malformed tool
    calls are left out; if all are malformed the whole turn is text, for the program to see the mistake."""
    calls = [call for call in action.tool_calls if call.status == "ok"]
    if action.tool_calls and not calls:
        return {"role": "assistant", "content": action.raw_text}
    text = action.text
    for string in stops:
        text = text.partition(string)[0]
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if action.reasoning:
        message["reasoning_content"] = action.reasoning
    if calls:
        written = [(call, json.dumps(call.arguments, ensure_ascii=False)) for call in calls]
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call, arguments in written
        ]
    return message


def as_chunks(answer: Mapping[str, Any], request: ChatRequest) -> Iterator[dict[str, Any]]:
    """An answer as the chunks of a stream: one with the message, one with the finish reason, one with the
    usage."""
    (choice,) = answer["choices"]
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
    head = {k: answer[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for delta, reason in ((message, None), ({}, choice["finish_reason"])):
        yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if request.has_usage:
        yield head | {"choices": [], "usage": answer["usage"]}
