from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
from tests.envs.playing import TASK, call, play, played, said

from braid.envs.agents.base import Opening, Step
from braid.envs.agents.tools import Tool, Toolbox, ToolEnv, fixed
from braid.errors import EnvError, ToolError
from braid.types import Action, ToolCall

LIMIT_S = 120.0
"""Deadline that is never reached."""


def _tool(name: str, function: Callable[[Mapping[str, Any]], Awaitable[object]], **fields: Any) -> Tool:
    schema = {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object"}},
    }
    return Tool(schema, function, **fields)


def _env(*tools: Tool, timeout_s: float = LIMIT_S, max_result_characters: int = 1000) -> ToolEnv:
    return ToolEnv([fixed(tools)], timeout_s=timeout_s, max_result_characters=max_result_characters)


async def _echo(arguments: Mapping[str, Any]) -> object:
    return arguments["value"]


async def _hang(arguments: Mapping[str, Any]) -> object:
    return await asyncio.Event().wait()


async def _refuse(arguments: Mapping[str, Any]) -> object:
    raise ToolError("no such page")


async def _crash(arguments: Mapping[str, Any]) -> object:
    raise KeyError("boom")


def test_a_turn_without_calls_ends_the_episode() -> None:
    opening, steps = asyncio.run(play(_env(_tool("echo", _echo)), []))
    assert opening == Opening((), [_tool("echo", _echo).schema])
    assert steps == [Step(is_done=True)]


def test_calls_are_answered_in_their_order_with_their_ids() -> None:
    (step,) = played(_env(_tool("echo", _echo)), [call("echo", "a", value="x"), call("echo", "b", value="y")])
    assert step.messages == [
        {"role": "tool", "tool_call_id": "a", "name": "echo", "content": "x"},
        {"role": "tool", "tool_call_id": "b", "name": "echo", "content": "y"},
    ]
    assert not step.is_done
    assert step.tool_s > 0


@pytest.mark.parametrize("status", ["bad_json", "not_an_object", "unknown_tool", "bad_arguments"])
def test_a_malformed_call_is_answered_with_its_error_and_the_others_run(status: Any) -> None:
    wrong = ToolCall("ehco", {}, "a", status, "write it properly")
    (step,) = played(_env(_tool("echo", _echo)), [wrong, call("echo", "b", value="y")])
    assert [m["content"] for m in step.messages] == ["write it properly", "y"]
    assert step.metrics == {}


def test_a_tool_error_is_read_by_the_policy() -> None:
    (step,) = played(_env(_tool("open", _refuse)), [call("open")])
    assert step.messages[0]["content"] == "no such page"
    assert step.metrics == {"tool_errors/open": 1}


def test_a_crash_is_a_failure_that_names_tool_and_arguments() -> None:
    with pytest.raises(EnvError, match=r"tool 'get' with {\"page\": 3} raised KeyError: 'boom'"):
        said(_env(_tool("get", _crash)), call("get", page=3))


def test_long_arguments_are_shortened_in_a_failure() -> None:
    with pytest.raises(EnvError) as failure:
        said(_env(_tool("get", _crash)), call("get", page="x" * 5000))
    assert len(str(failure.value)) < 300


def test_a_failure_ends_the_other_calls_of_the_turn() -> None:
    was_cancelled = asyncio.Event()

    async def slow(arguments: Mapping[str, Any]) -> object:
        try:
            return await _hang(arguments)
        finally:
            was_cancelled.set()

    with pytest.raises(EnvError, match="raised KeyError"):
        said(_env(_tool("slow", slow), _tool("get", _crash)), call("slow"), call("get"))
    assert was_cancelled.is_set()


def test_a_tool_that_hangs_is_a_failure_at_its_deadline() -> None:
    with pytest.raises(EnvError, match=r"tool 'wait' with {} timed out after 0\.01 s"):
        said(_env(_tool("wait", _hang), timeout_s=0.01), call("wait"))


def test_a_time_out_of_the_tool_itself_is_no_missed_deadline() -> None:
    async def late(arguments: Mapping[str, Any]) -> object:
        raise TimeoutError("connection timed out")

    with pytest.raises(EnvError, match="raised TimeoutError: connection timed out"):
        said(_env(_tool("late", late)), call("late"))


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError(), StopIteration()])
def test_no_exception_of_a_tool_escapes(raised: BaseException) -> None:
    async def leave(arguments: Mapping[str, Any]) -> object:
        raise raised

    with pytest.raises(EnvError, match="tool 'leave'"):
        said(_env(_tool("leave", leave)), call("leave"))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"a": [1, None, "é"]}, '{"a": [1, null, "é"]}'),
        (None, "null"),
        (1.5, "1.5"),
        ({1, 2}, '"{1, 2}"'),
        ("<|im_end|>", "<|im_end|>"),
    ],
)
def test_a_result_that_is_no_text_becomes_json(result: object, text: str) -> None:
    assert said(_env(_tool("echo", _echo)), call("echo", value=result)) == [text]


def test_a_long_result_is_cut() -> None:
    (text,) = said(
        _env(_tool("echo", _echo), max_result_characters=10), call("echo", value="0123456789" * 1000)
    )
    assert text == "0123456789\n[cut: 10,000 characters]"


def test_calls_of_a_turn_run_concurrently() -> None:
    async def both() -> list[str]:
        barrier = asyncio.Barrier(2)

        async def meet(arguments: Mapping[str, Any]) -> object:
            await barrier.wait()
            return "met"

        _, (step,) = await play(_env(_tool("meet", meet)), [call("meet", "a"), call("meet", "b")])
        return [m["content"] for m in step.messages]

    assert asyncio.run(both()) == ["met", "met"]


def test_calls_that_share_a_lock_run_in_order_each_with_its_own_deadline() -> None:
    events: list[str] = []

    async def visit(arguments: Mapping[str, Any]) -> object:
        events.append(f"enter {arguments['value']}")
        await asyncio.sleep(0)
        events.append(f"leave {arguments['value']}")
        return ""

    said(
        _env(_tool("visit", visit, lock=asyncio.Lock())), *(call("visit", str(n), value=n) for n in range(3))
    )
    assert events == [f"{verb} {n}" for n in range(3) for verb in ("enter", "leave")]


def test_a_cancelled_episode_leaves_no_call_running() -> None:
    async def cancelled() -> None:
        is_inside, is_left = asyncio.Event(), asyncio.Event()

        async def wait(arguments: Mapping[str, Any]) -> object:
            is_inside.set()
            try:
                return await _hang(arguments)
            finally:
                is_left.set()

        episode = asyncio.create_task(play(_env(_tool("wait", wait)), [call("wait")]))
        await is_inside.wait()
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert is_left.is_set()

    asyncio.run(cancelled())


def test_colliding_names_get_a_prefix_and_others_none() -> None:
    def boxes(*prefixes: str) -> ToolEnv:
        opened = [Toolbox([_tool("add", _echo), _tool(f"only_{p}", _echo)], prefix=p) for p in prefixes]
        return ToolEnv(
            [lambda _task, _seed, box=box: nullcontext(box) for box in opened],
            timeout_s=LIMIT_S,
            max_result_characters=9,
        )

    opening, _ = asyncio.run(play(boxes("a", "b")))
    assert [t["function"]["name"] for t in opening.tools] == ["a_add", "only_a", "b_add", "only_b"]
    assert said(boxes("a", "b"), call("b_add", value="x")) == ["x"]
    with pytest.raises(EnvError, match="two tools are named 'a_add'"):
        asyncio.run(play(boxes("a", "a")))


def test_close_is_safe_before_and_after_the_start() -> None:
    async def twice() -> None:
        env = _env(_tool("echo", _echo))
        await env.close()
        await env.start(TASK, 0)
        await env.step(Action("done"))
        await env.close()
        await env.close()

    asyncio.run(twice())
