from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.envs.playing import TASK, call, play, played, said

from braid.envs.agents.functions import class_toolbox, function_tool
from braid.envs.agents.toolboxes import ToolEnvs
from braid.envs.agents.tools import ToolEnv, fixed
from braid.envs.kinds import ToolsEnv
from braid.errors import ConfigError, EnvError, ToolError
from braid.types import Prompt


def _env(*functions: Callable[..., Any], timeout_s: float = 120.0) -> ToolEnv:
    tools = [function_tool(function, key="env.tools") for function in functions]
    return ToolEnv([fixed(tools)], timeout_s=timeout_s, max_result_characters=1000)


def _object(cls: type) -> ToolEnv:
    return ToolEnv([class_toolbox(cls, key="env.tools")[1]], timeout_s=120.0, max_result_characters=1000)


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    return a + b


async def add_later(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    await asyncio.sleep(0)
    return a + b


def fail(how: str) -> str:
    """Fail.

    Args:
        how: The way to fail.
    """
    raise {"tool": ToolError("not here"), "exit": SystemExit(2), "stop": StopIteration()}.get(
        how, ZeroDivisionError(how)
    )


class Counter:
    """Counts, for one episode."""

    made: list[Counter] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.count, self.is_closed, self.is_busy = 0, False, threading.Lock()
        self.made.append(self)

    def reset(self, start: int, seed: int) -> str:
        self.count = start
        return f" Count from {start} (seed {seed})."

    def increase(self, by: int) -> int:
        """Increase the count.

        Args:
            by: How much.
        """
        assert self.is_busy.acquire(blocking=False), "two calls at a time"
        self.count += by
        self.is_busy.release()
        return self.count

    async def read(self) -> int:
        """Read the count."""
        return self.count

    def get_reward(self) -> float:
        return self.count / 10

    def close(self) -> None:
        self.is_closed = True

    def _helper(self) -> None: ...


def test_the_schema_is_that_of_transformers_without_the_return_value() -> None:
    assert function_tool(add, key="").schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {"type": "integer", "description": "The second number."},
                },
                "required": ["a"],
            },
        },
    }


def test_functions_are_called_with_the_arguments() -> None:
    assert said(_env(add, add_later), call("add", a=2), call("add_later", a=2, b=3)) == ["3", "5"]


@pytest.mark.parametrize("arguments", [{}, {"a": 1, "c": 2}])
def test_arguments_that_do_not_fit_are_the_policys_mistake(arguments: dict[str, Any]) -> None:
    (step,) = played(_env(add), [call("add", **arguments)])
    assert step.messages[0]["content"].startswith("error: ")
    assert step.metrics["tool_errors/add"] == 1


def test_a_type_error_inside_the_function_is_not() -> None:
    with pytest.raises(EnvError, match="raised TypeError: can only concatenate str"):
        said(_env(add), call("add", a="x"))


@pytest.mark.parametrize(
    ("how", "failure"), [("exit", "SystemExit: 2"), ("stop", "StopIteration"), ("x", "ZeroDivisionError: x")]
)
def test_a_synchronous_function_can_raise_anything(how: str, failure: str) -> None:
    with pytest.raises(EnvError, match=f"tool 'fail' with .* raised .*{failure}"):
        said(_env(fail), call("fail", how=how))
    assert said(_env(fail), call("fail", how="tool")) == ["not here"]


def test_a_synchronous_function_that_hangs_delays_nobody() -> None:
    released = threading.Event()

    def wait() -> None:
        """Wait."""
        released.wait()

    async def both() -> list[Any]:
        hanging = play(_env(wait, timeout_s=0.05), [call("wait")])
        quick = play(_env(add), [call("add", a=1)])
        return await asyncio.gather(hanging, quick, return_exceptions=True)

    try:
        failure, (_, (step,)) = asyncio.run(both())
        assert isinstance(failure, EnvError)
        assert step.messages[0]["content"] == "2"
    finally:
        released.set()


def test_forty_synchronous_calls_run_at_a_time() -> None:
    barrier = threading.Barrier(40)

    def meet() -> str:
        """Meet the others."""
        barrier.wait(60)
        return "met"

    assert said(_env(meet), *(call("meet", str(n)) for n in range(40))) == ["met"] * 40


@pytest.mark.parametrize("text", ["no docstring", "Args without the argument"])
def test_a_function_without_a_schema_is_refused(text: str) -> None:
    def tool(a: int) -> int:
        return a

    tool.__doc__ = None if text == "no docstring" else text
    with pytest.raises(ConfigError, match=r"env\.tools: no schema for the tool .*tool.*`Args:`"):
        function_tool(tool, key="env.tools")


def test_an_object_lives_for_one_episode() -> None:
    Counter.made.clear()
    task = Prompt("t:0", "t", (1,), TASK.messages, {"start": 3, "answer": "unused"})
    turns = [[call("increase", "a", by=2), call("increase", "b", by=1), call("read", "c")], []]
    for _ in range(2):
        opening, (step, last) = asyncio.run(play(_object(Counter), *turns, task=task, seed=7))
        assert [t["function"]["name"] for t in opening.tools] == ["increase", "read"]
        assert opening.messages == [{"role": "user", "content": "2*3= Count from 3 (seed 7)."}]
        assert [m["content"] for m in step.messages] == ["5", "6", "6"]
        assert (last.is_done, last.reward) == (True, 0.6)
    assert [thing.is_closed for thing in Counter.made] == [True, True]


def test_an_object_is_closed_when_its_reset_fails() -> None:
    Counter.made.clear()
    with pytest.raises(TypeError, match="start"):
        played(_object(Counter))
    assert Counter.made[0].is_closed


def test_a_reset_that_takes_any_column_gets_all() -> None:
    class All:
        def reset(self, **columns: Any) -> None:
            self.columns = columns

        def read(self) -> dict[str, Any]:
            """Read the columns."""
            return self.columns

    assert said(_object(All), call("read")) == ['{"seed": 0, "answer": "6"}']


SOURCE = '''
def shout(text: str) -> str:
    """Shout.

    Args:
        text: What to shout.
    """
    return text.upper()

class Memory:
    def __init__(self):
        self.text = ""

    def note(self, text: str) -> str:
        """Remember a text.

        Args:
            text: The text.
        """
        self.text += text
        return self.text
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path


def _made(folder: Path, *tools: Any, **fields: Any) -> ToolEnv:
    return ToolEnvs(ToolsEnv(kind="tools", tools=tools, **fields), folder)()


def test_a_config_names_tools(folder: Path) -> None:
    env = _made(folder, "calculator", "mine.py:shout", "mine.py:Memory", max_result_characters=7)
    answers = said(
        env,
        call("calculator", expression="2*3"),
        call("shout", text="hello"),
        call("note", text="a"),
        call("calculator", expression="1/0"),
    )
    assert answers == ["6", "HELLO", "a", "error: \n[cut: 23 characters]"]


def test_episodes_of_a_config_share_no_state(folder: Path) -> None:
    envs = ToolEnvs(ToolsEnv(kind="tools", tools=("mine.py:Memory",)), folder)
    assert said(envs(), call("note", text="a")) == said(envs(), call("note", text="a")) == ["a"]


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        (["calculatr"], r"env.tools\[0\]: unknown tool 'calculatr', did you mean 'calculator'"),
        (
            ["calculator", "mine.py:shuot"],
            r"env.tools\[1\]: .* has no 'shuot', did you mean 'shout'",
        ),
        (["calculator", "calculator"], "two tools are named 'calculator'"),
        (["math.sqrt"], r"env.tools\[0\]: no schema for the tool sqrt"),
    ],
)
def test_a_config_with_wrong_tools_is_refused(folder: Path, tools: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _made(folder, *tools)
