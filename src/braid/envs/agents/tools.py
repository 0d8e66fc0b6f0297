"""The tool environment: the policy calls tools until a turn has no calls, which ends the episode.

Malformed calls are answered with their error, the others run concurrently. Tools come from toolboxes, each
opened for an episode and closed with it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from braid.errors import EnvError, ToolError
from braid.types import Action, Message, Prompt, ToolCall, exact_sum
from braid.users import described, is_the_users, message_of

from .base import Opening, Step, ToolSchema


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool and the schema that the policy sees.

    `call` takes arguments that fit the schema and returns text, or a value that becomes JSON. It raises
    ToolError for mistakes of the policy; any other exception is a failure of the environment. Calls that
    share a `lock` run one after the other, in order. With `has_deadline` the tool limits the time of a call
    itself.
    """

    schema: ToolSchema
    call: Callable[[Mapping[str, Any]], Awaitable[object]]
    lock: asyncio.Lock | None = None
    has_deadline: bool = False

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def renamed(self, name: str) -> Tool:
        schema = {**self.schema, "function": {**self.schema["function"], "name": name}}
        return Tool(schema, self.call, self.lock, self.has_deadline)


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Tools of one episode. Those whose names other toolboxes have too are renamed to `prefix`_name. `note`
    is appended to the task's last user message; `reward` is that of the episode, called at its end."""

    tools: Sequence[Tool]
    prefix: str = ""
    note: str = ""
    reward: Callable[[], Awaitable[float]] | None = None


OpenToolbox = Callable[[Prompt, int], AbstractAsyncContextManager[Toolbox]]
"""Opens a toolbox for an episode, given its task and seed."""


def fixed(tools: Sequence[Tool]) -> OpenToolbox:
    """A toolbox without state, the same in every episode."""
    return lambda _task, _seed: nullcontext(Toolbox(tools))


class ToolEnv:
    """Answers tool calls until a turn has none. See base.AgentEnv.

    A call that takes longer than `timeout_s`, or whose tool raises anything but ToolError, raises EnvError.
    Results are cut after `max_result_characters`.
    """

    def __init__(
        self, toolboxes: Sequence[OpenToolbox], *, timeout_s: float, max_result_characters: int
    ) -> None:
        self._toolboxes, self._timeout_s = toolboxes, timeout_s
        self._max_characters = max_result_characters
        self._stack = AsyncExitStack()
        self._opened: list[Toolbox] = []
        self._tools: dict[str, Tool] = {}

    async def start(self, task: Prompt, seed: int) -> Opening:
        for toolbox in self._toolboxes:
            self._opened.append(await self._stack.enter_async_context(toolbox(task, seed)))
        self._tools = _by_name(self._opened)
        notes = "".join(box.note for box in self._opened)
        messages = _with_note(task.messages, notes) if notes else ()
        return Opening(messages, [tool.schema for tool in self._tools.values()])

    async def step(self, action: Action) -> Step:
        if not action.tool_calls:
            return Step(is_done=True, reward=await self.final_reward())
        start_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(call)) for call in action.tool_calls]
        except ExceptionGroup as failures:
            failure = failures.exceptions[0]
            raise failure from failure.__cause__
        tool_s = time.perf_counter() - start_s
        answers = [task.result() for task in tasks]
        messages: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            for call, (_, text) in zip(action.tool_calls, answers, strict=True)
        ]
        pairs = zip(action.tool_calls, answers, strict=True)
        metrics = Counter(f"tool_errors/{call.name}" for call, (status, _) in pairs if status == "tool_error")
        return Step(messages, metrics=metrics, tool_s=tool_s)

    async def final_reward(self) -> float:
        """The reward of the episode up to now; a limit may have ended it."""
        return exact_sum([await box.reward() for box in self._opened if box.reward])

    async def close(self) -> None:
        await self._stack.aclose()

    async def _answer(self, call: ToolCall) -> tuple[str, str]:
        """The status of a call, and the text that answers it."""
        if call.status != "ok":
            return call.status, self._cut(call.error)
        tool = self._tools[call.name]
        deadline = asyncio.timeout(None if tool.has_deadline else self._timeout_s)
        try:
            async with tool.lock or nullcontext():
                async with deadline:
                    result = await tool.call(call.arguments)
                text = (
                    result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
                )
            return "ok", self._cut(text)
        except ToolError as error:
            return "tool_error", self._cut(message_of(error))
        except EnvError:
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise EnvError(f"{_named(call)} was cancelled by the tool itself") from error
        except BaseException as error:
            if not is_the_users(error):
                raise
            if deadline.expired():
                raise EnvError(f"{_named(call)} timed out after {self._timeout_s:g} s") from error
            raise EnvError(f"{_named(call)} raised {described(error)}") from error

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_characters:
            return text
        return f"{text[: self._max_characters]}\n[cut: {len(text):,} characters]"


def _named(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
    return f"tool {call.name!r} with {arguments if len(arguments) <= 200 else arguments[:200] + '...'}"


def _by_name(boxes: Sequence[Toolbox]) -> dict[str, Tool]:
    count = Counter(tool.name for box in boxes for tool in box.tools)
    tools: dict[str, Tool] = {}
    for box in boxes:
        for tool in box.tools:
            if count[tool.name] > 1 and box.prefix:
                tool = tool.renamed(f"{box.prefix}_{tool.name}")
            if tool.name in tools:
                raise EnvError(f"two tools are named {tool.name!r}; rename one of them")
            tools[tool.name] = tool
    return tools


def _with_note(messages: Sequence[Message], note: str) -> list[Message]:
    """The messages with the note at the end of the last user message."""
    noted = list(messages)
    for i in reversed(range(len(noted))):
        if noted[i]["role"] == "user":
            noted[i] = {**noted[i], "content": noted[i]["content"] + note}
            return noted
    return [*noted, {"role": "user", "content": note}]
