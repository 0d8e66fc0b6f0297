from __future__ import annotations

import asyncio

import pytest

from braid.config.rollout import SingleTurnEnv, ToolEnv
from braid.envs.text.base import Reply
from braid.envs.text.build import text_env_maker
from braid.envs.text.single_turn import SingleTurn
from braid.envs.text.tools import ToolConversation
from braid.errors import EnvError


async def _hanging(argument: str) -> str:
    await asyncio.sleep(60)
    return argument


async def _raising(argument: str) -> str:
    raise KeyError(argument)


def _tools(max_turns: int = 3) -> ToolConversation:
    env = text_env_maker(ToolEnv(kind="tools", max_turns=max_turns))()
    assert isinstance(env, ToolConversation)
    return env


def test_a_call_is_answered_and_an_answer_without_a_call_ends_it() -> None:
    env = _tools()
    assert asyncio.run(env.reply("so <calc>12*7</calc>")) == Reply("<out>84</out>")
    assert asyncio.run(env.reply("A:84")) == Reply(is_done=True)


def test_a_reply_tells_the_time_spent_in_tools() -> None:
    env = _tools()
    assert asyncio.run(env.reply("<calc>1+1</calc>")).tool_s > 0
    assert asyncio.run(env.reply("A:2")).tool_s == 0


def test_a_mistake_in_a_call_is_answered_with_text() -> None:
    assert asyncio.run(_tools().reply("<calc>1/0</calc>")) == Reply("<out>error: division by zero</out>")


def test_a_call_in_the_last_turn_truncates() -> None:
    env = _tools(max_turns=2)
    asyncio.run(env.reply("<calc>1+1</calc>"))
    assert asyncio.run(env.reply("<calc>2+2</calc>")) == Reply(is_truncated=True)


@pytest.mark.parametrize("text", ["<calc>1+1", "1+1</calc>", "<other>1</other>", "<calc>1</other>", ""])
def test_text_without_a_call_is_an_answer(text: str) -> None:
    assert asyncio.run(_tools().reply(text)) == Reply(is_done=True)


def test_turns_stop_at_the_closing_tag() -> None:
    assert _tools().stop_strings == ("</calc>",)


def test_calls_and_answers_are_rendered_as_they_are_read() -> None:
    assert asyncio.run(_tools().reply("<calc>2*3</calc>")) == Reply("<out>6</out>")


def test_a_tool_that_hangs_is_a_failure_of_the_environment() -> None:
    env = ToolConversation({"slow": _hanging}, max_turns=3, timeout_s=0.01)
    with pytest.raises(EnvError, match=r"tool 'slow' timed out after 0\.01 s on 'x'"):
        asyncio.run(env.reply("<slow>x</slow>"))


def test_a_tool_that_raises_is_a_failure_of_the_environment() -> None:
    env = ToolConversation({"bad": _raising}, max_turns=3, timeout_s=60.0)
    with pytest.raises(EnvError, match="tool 'bad' raised KeyError: 'x' on 'x'"):
        asyncio.run(env.reply("<bad>x</bad>"))


def test_each_trajectory_gets_its_own_environment() -> None:
    make = text_env_maker(ToolEnv(kind="tools"))
    assert make() is not make()
    assert isinstance(text_env_maker(SingleTurnEnv())(), SingleTurn)
