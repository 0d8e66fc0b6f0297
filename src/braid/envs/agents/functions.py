"""Python functions and objects as tools, by the convention of Transformers and TRL.

A function needs type hints and a docstring in Google's format. It returns the result, and raises ToolError
for mistakes of the policy. Synchronous functions run in a thread, and must then be thread-safe.

A class is instantiated for each episode; its public methods are tools, called one at a time. It may define
`reset(**fields)`, called with the columns of the task's data row and `seed`, as far as it takes them; the
text that it returns is appended to the task's last user message. `get_reward()` returns the reward of the
episode; `close()` is called at its end.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from braid.errors import ConfigError, Problem, ToolError
from braid.isolation.threads import start
from braid.types import Prompt
from braid.users import described, finite_number, message_of, shown

from .base import ToolSchema
from .tools import OpenToolbox, Tool, Toolbox

_LIFE = ("reset", "get_reward", "close")
"""Methods of a class that are no tools."""


def function_tool(function: Callable[..., Any], *, key: str) -> Tool:
    """Raises ConfigError for the config key `key` if the function's schema cannot be derived."""
    return Tool(schema_of(function, key=key), partial(_call, function))


def schema_of(function: Callable[..., Any], *, key: str) -> ToolSchema:
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)["function"]
    except Exception as error:  # of its type hints, docstring, or names in either
        where = getattr(function, "__qualname__", repr(function))
        problem = (
            f"no schema for the tool {where}: {message_of(error)}; a tool needs type hints and a docstring "
            "with a section `Args:` that describes each argument"
        )
        raise ConfigError([Problem(key, problem, "config")]) from error
    schema.pop("return", None)  # neither OpenAI's format nor MCP has it
    return {"type": "function", "function": schema}


def class_toolbox(cls: type, *, key: str) -> tuple[list[ToolSchema], OpenToolbox]:
    """The schemas of the class's methods, and its toolbox. Raises ConfigError for the config key `key`."""
    methods = [
        name
        for name, _ in inspect.getmembers(cls, inspect.isroutine)
        if not name.startswith("_") and name not in _LIFE
    ]
    if not methods:
        raise ConfigError([Problem(key, f"{cls.__qualname__} has no public methods to use as tools")])
    schemas = {name: schema_of(getattr(cls, name), key=key) for name in methods}
    return [*schemas.values()], partial(_opened, cls, schemas)


def _opened(
    cls: type, schemas: Mapping[str, ToolSchema], task: Prompt, seed: int
) -> AbstractAsyncContextManager[Toolbox]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Toolbox]:
        thing, lock = await _run(cls), asyncio.Lock()
        tools = [Tool(schema, partial(_call, getattr(thing, name)), lock) for name, schema in schemas.items()]
        try:
            note = ""
            if hasattr(thing, "reset"):
                note = await _run(thing.reset, **_accepted(thing.reset, {"seed": seed, **task.fields}))
                if not isinstance(note, str | None):
                    raise ValueError(f"reset() returned {shown(note)}, not text or None")
            reward = partial(_reward, thing.get_reward) if hasattr(thing, "get_reward") else None
            yield Toolbox(tools, note=note or "", reward=reward)
        finally:
            if hasattr(thing, "close"):
                await _run(thing.close)

    return opened()


async def _reward(get_reward: Callable[[], Any]) -> float:
    return finite_number(await _run(get_reward), "get_reward() returned")


async def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ToolError(f"error: {error}") from None
    return await _run(function, **arguments)


async def _run(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call an async function here, another one in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)

    def outcome() -> tuple[Any, BaseException | None]:
        try:
            return function(**arguments), None
        except BaseException as error:
            return None, error

    value, failure = await asyncio.wrap_future(start(outcome))
    if isinstance(failure, Exception) and not isinstance(failure, StopIteration):
        raise failure
    if failure is not None:  # SystemExit and the like end neither thread nor run
        raise RuntimeError(described(failure)) from failure
    return await value if inspect.isawaitable(value) else value


def _accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}
