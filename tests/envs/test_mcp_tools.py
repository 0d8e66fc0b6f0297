from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pydantic
import pytest
from tests.envs.playing import TASK, call, play
from tests.leftovers import await_end
from tests.needs import needs

from braid.cluster.loops import Loop
from braid.envs.agents.base import Opening, Step
from braid.envs.agents.toolboxes import ToolEnvs
from braid.envs.kinds import McpServer, ToolsEnv
from braid.errors import ConfigError, EnvError
from braid.types import Action, ToolCall

pytestmark = [pytest.mark.slow, needs("mcp")]

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = {"command": sys.executable, "args": (str(SERVER),)}


class Run:
    """Plays episodes on one event loop, like a rollout worker."""

    def __init__(self, *tools: str | dict[str, Any], timeout_s: float = 120.0) -> None:
        config = ToolsEnv.model_validate({"kind": "tools", "tools": tools, "tool_timeout_s": timeout_s})
        self.envs, self.loop = ToolEnvs(config, SERVER.parent), Loop()

    def play(self, *turns: list[ToolCall]) -> tuple[Opening, list[Step]]:
        return self.loop.run(play(self.envs(), *turns))

    def say(self, *calls: ToolCall) -> list[str]:
        return [str(m["content"]) for m in self.play([*calls])[1][0].messages]

    def close(self) -> None:
        try:
            self.loop.run(self.envs.close())
        finally:
            self.loop.close()


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    run = Run(COMMAND)
    yield run
    started = _children()
    run.close()
    await_end(started)


@pytest.fixture
def ended() -> Iterator[list[Run]]:
    """Runs that are closed after the test, which must leave no process."""
    runs, before = list[Run](), _children()
    yield runs
    started = _children() - before
    for run in runs:
        run.close()
    await_end(started)


def test_tools_of_a_server_are_called(run: Run) -> None:
    opening, (step,) = run.play([call("add", "a", a=1, b=2), call("add", "b", a=3, b=4)])
    function = opening.tools[0]["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a", "b"]
    assert [m["content"] for m in step.messages] == ["3", "7"]


def test_calls_of_a_turn_reach_the_server_together(run: Run) -> None:
    assert run.say(call("meet", "a"), call("meet", "b")) == ["met", "met"]


def test_episodes_share_a_server(run: Run) -> None:
    assert run.say(call("process")) == run.say(call("process"))


def test_an_error_result_is_read_by_the_policy(run: Run) -> None:
    _, (step,) = run.play([call("fail", "a"), call("refuse", "b"), call("picture", "c")])
    failed, refused, picture = (str(m["content"]) for m in step.messages)
    assert "Error executing tool fail" in failed
    assert "page is not a page" in refused
    assert picture == "[image]"
    assert (step.metrics["tool_errors/fail"], step.metrics["tool_errors/refuse"]) == (1, 1)


def test_a_server_that_dies_is_a_failure_and_the_next_episode_has_a_new_one(run: Run) -> None:
    with pytest.raises(
        EnvError, match=r"(?s)tool 'die' of the MCP server .*Connection closed; .*\nlast words"
    ):
        run.say(call("die"))
    assert run.say(call("add", a=1, b=1)) == ["2"]


def test_a_cancelled_episode_leaves_the_shared_server(run: Run) -> None:
    async def cancelled() -> None:
        env = run.envs()
        await env.start(TASK, 0)
        hanging = asyncio.create_task(env.step(Action("", tool_calls=(call("hang"),))))
        await play(run.envs(), [call("process")])
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        await env.close()

    (before,) = run.say(call("process"))
    run.loop.run(cancelled())
    assert run.say(call("process")) == [before]


def test_a_time_out_is_a_failure_that_leaves_other_episodes_alone(ended: list[Run]) -> None:
    run = Run(COMMAND, timeout_s=3.0)
    ended.append(run)

    async def beside() -> tuple[list[Step], list[Step]]:
        env = run.envs()
        await env.start(TASK, 0)
        with pytest.raises(EnvError, match=r"tool 'hang' .* timed out after 3 s"):
            await play(run.envs(), [call("hang")])
        replaced = await play(run.envs(), [call("process")])
        old = [await env.step(Action("", tool_calls=(call("process"),)))]
        await env.close()
        return old, replaced[1]

    old, new = run.loop.run(beside())
    assert old[0].messages[0]["content"] != new[0].messages[0]["content"]


def test_a_server_per_episode_keeps_state_for_it_alone(ended: list[Run]) -> None:
    run, before = Run({**COMMAND, "per_episode": True}), _children()
    ended.append(run)

    async def both() -> list[Any]:
        turns = [[call("increase")], [call("increase")]]
        return await asyncio.gather(*(play(run.envs(), *turns) for _ in range(2)))

    for _, steps in run.loop.run(both()):
        assert [step.messages[0]["content"] for step in steps] == ["1", "2"]
    assert _children() == before


def test_colliding_names_are_prefixed_with_the_servers(ended: list[Run]) -> None:
    run = Run(COMMAND, {**COMMAND, "name": "other", "error_is_failure": True})
    ended.append(run)
    opening, (step,) = run.play([call("demo_server_add", "a", a=1, b=2), call("other_add", "b", a=3, b=4)])
    assert {"demo_server_add", "other_add"} <= {tool["function"]["name"] for tool in opening.tools}
    assert [m["content"] for m in step.messages] == ["3", "7"]
    with pytest.raises(EnvError, match="tool 'fail' of the MCP server 'other' failed: Error executing"):
        run.say(call("demo_server_fail"), call("other_fail"))


def test_a_function_reads_the_same_through_a_server(ended: list[Run]) -> None:
    turns = [[call("calculator", expression=text)] for text in ("12*7", "1/0", "1/3", "é")]
    direct = Run("calculator")
    opening, steps = direct.play(*turns)
    server = {
        "command": "python",
        "args": (str(SERVER.with_name("mcp_calculator.py")), json.dumps(opening.tools[0]["function"])),
        "env": {"PYTHONPATH": os.pathsep.join(sys.path)},
    }
    served = Run(server)
    ended += [direct, served]
    episode = served.play(*turns)
    assert episode == (opening, steps)
    assert json.dumps(episode[0].tools) == json.dumps(opening.tools), "also in the order of keys"


@pytest.mark.parametrize(
    ("limit_s", "code", "why"),
    [
        (60.0, "raise SystemExit('no database')", "Connection closed.*\nno database"),
        (
            1.0,
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
            "no answer within 1 s",
        ),
        (1.0, "print('hello', flush=True); import sys; sys.stdin.read()", "no answer within 1 s"),
    ],
)
def test_a_server_that_does_not_start_is_a_failure(
    ended: list[Run], monkeypatch: pytest.MonkeyPatch, limit_s: float, code: str, why: str
) -> None:
    monkeypatch.setattr("braid.envs.agents.mcp.START_LIMIT_S", limit_s)
    run = Run({"command": sys.executable, "args": ("-c", code), "name": "broken"})
    ended.append(run)
    with pytest.raises(EnvError, match=f"(?s)the MCP server 'broken' did not start: .*{why}"):
        run.say(call("add"))


def test_a_server_is_reached_over_http(ended: list[Run]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = Run({"url": f"http://127.0.0.1:{port}/mcp"})
    ended.append(run)
    with pytest.raises(EnvError, match=rf"the MCP server 'http://127.0.0.1:{port}/mcp' did not start: "):
        run.say(call("add"))
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            while "running on" not in server.stderr.readline():
                assert server.poll() is None
            assert run.say(call("add", a=1, b=2)) == ["3"]
            assert run.say(call("increase", "a"), call("meet", "b"), call("meet", "c"))[1:] == ["met", "met"]
        finally:
            server.kill()
    with pytest.raises(EnvError, match="tool 'add' of the MCP server"):
        run.say(call("add", a=1, b=2))


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ({"command": "no-such-program"}, r"env.tools\[0\].command: no such program: 'no-such-program'"),
        ({"command": "./nowhere/server"}, r"no such program: './nowhere/server'"),
    ],
)
def test_a_command_that_does_not_exist_is_refused(server: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ToolEnvs(ToolsEnv.model_validate({"kind": "tools", "tools": [server]}), SERVER.parent)


@pytest.mark.parametrize("fields", [{}, {"command": "python", "url": "http://localhost/mcp"}])
def test_a_server_has_either_a_command_or_a_url(fields: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError, match="either `command` or `url`"):
        McpServer(**fields)


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.envs.playing import call, play
from braid.envs.kinds import McpServer, ToolsEnv
from braid.envs.agents.toolboxes import ToolEnvs

deaf = "import subprocess, sys, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
server = McpServer(command=sys.executable, args=("-c", deaf))
asyncio.run(play(ToolEnvs(ToolsEnv(kind="tools", tools=(server,)), Path())(), [call("add")]))
"""


def test_no_server_outlives_a_killed_run() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, "-c", KILLED], env=environment)
    started: list[psutil.Process] = []
    try:
        while len(started) < 3:  # guard, server, and what the server has started
            assert run.poll() is None
            started = psutil.Process(run.pid).children(recursive=True)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    await_end(started)
