from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.envs.playing import call, play, played
from tests.leftovers import await_end
from tests.needs import need_sandbox

from braid.envs.agents.toolboxes import ToolEnvs
from braid.envs.kinds import ToolsEnv
from braid.errors import EnvError
from braid.isolation.sandbox import find_isolation

pytestmark = pytest.mark.usefixtures("nothing_is_left")

Play = Callable[..., list[str]]


@pytest.fixture(params=["bubblewrap", "sandlock", "process"])
def envs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ToolEnvs]:
    if request.param != "process":
        need_sandbox(request.param)
    with _envs(request.param, tmp_path) as tool_envs:
        yield tool_envs


class _envs:
    def __init__(self, isolation: str, folder: Path, **fields: Any) -> None:
        python = {"isolation": isolation, "memory_bytes": 2**28}
        self._envs = ToolEnvs(ToolsEnv(kind="tools", tools=("python",), python=python, **fields), folder)

    def __enter__(self) -> ToolEnvs:
        return self._envs

    def __exit__(self, *_: object) -> None:
        asyncio.run(self._envs.close())


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[ToolEnvs]:
    """In any sandbox, with a short deadline and short results."""
    need_sandbox()
    with _envs("auto", tmp_path, tool_timeout_s=1.0, max_result_characters=300) as tool_envs:
        yield tool_envs


def _said(envs: ToolEnvs, *codes: str) -> list[str]:
    """The results of calls in one episode, each in a turn."""
    steps = played(envs(), *([call("python", code=code)] for code in codes))
    return [str(step.messages[0]["content"]) for step in steps]


def test_variables_last_for_an_episode(envs: ToolEnvs) -> None:
    assert _said(envs, "x = 20", "print('twice')\n2 * x", "def f(y): return x + y", "f(1)") == [
        "(no output)",
        "twice\n40",
        "(no output)",
        "21",
    ]
    (lost,) = _said(envs, "x")
    assert lost.endswith("NameError: name 'x' is not defined")


def test_an_exception_is_text_with_the_line(envs: ToolEnvs) -> None:
    first, second, third = _said(envs, "print('so far')\n1 / 0", "x = (", "import sys; sys.exit(3)")
    assert first.startswith("so far\nTraceback")
    assert "    1 / 0\n" in first
    assert first.endswith("ZeroDivisionError: division by zero")
    assert second.endswith("SyntaxError: '(' was never closed")
    assert third.endswith("SystemExit: 3")
    assert "confined" not in first + second + third


def test_a_late_call_ends_the_process_and_says_so(quick: ToolEnvs) -> None:
    _, late, after = _said(quick, "x = 1", "while True: pass", "x = 2\nx")
    assert late == (
        "error: the Python process timed out after 1 s; it starts anew, without earlier variables"
    )
    assert after == "2"


@pytest.mark.parametrize(
    "code",
    ["import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)", "import ctypes; ctypes.string_at(0)"],
)
def test_a_process_that_ends_is_the_policys_mistake(quick: ToolEnvs, code: str) -> None:
    ended, after = _said(quick, code, "1")
    assert ended.startswith("error: the Python process exited or exceeded its limits")
    assert after == "1"


def test_memory_is_limited(quick: ToolEnvs) -> None:
    (text,) = _said(quick, "x = bytearray(2**30)")
    assert text.endswith("MemoryError") or "exceeded its limits" in text  # as the sandbox enforces it


def test_output_is_bounded_and_the_exception_kept(quick: ToolEnvs) -> None:
    (text,) = _said(quick, "for _ in range(10**5): print('x' * 100)\nprint(undefined)")
    assert text.startswith("x" * 100)
    assert text.endswith("NameError: name 'undefined' is not defined")
    assert "[cut: 10,100,000 characters]" in text
    assert len(text) <= 300


def test_code_that_forks_or_writes_to_descriptors_harms_only_itself(quick: ToolEnvs) -> None:
    forked, *_ = _said(quick, "import os\nos.fork()\n7", "8")
    assert forked == "7"
    code = "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'[1]\\n')\n    except OSError: pass"
    assert _said(quick, code)[0].startswith("error: the Python process")
    assert _said(quick, "9") == ["9"]


def test_there_is_no_network_nor_secret(quick: ToolEnvs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAID_TEST_SECRET", "s3cret")
    code = "import os, socket\nprint(os.environ.get('BRAID_TEST_SECRET'))\nsocket.create_connection(('127.0.0.1', 9))"
    text = _said(quick, code)[0]
    assert text.startswith("None\n")
    assert "Error" in text


def test_episodes_at_a_time_have_their_own_process(quick: ToolEnvs) -> None:
    async def both() -> list[Any]:
        async def one(n: int) -> list[Any]:
            turns = [[call("python", code=f"x = {n}")], [call("python", code="x")]]
            return (await play(quick(), *turns))[1]

        return await asyncio.gather(*(one(n) for n in range(3)))

    assert [steps[1].messages[0]["content"] for steps in asyncio.run(both())] == ["0", "1", "2"]


def test_calls_of_a_turn_run_in_order(quick: ToolEnvs) -> None:
    calls = [call("python", str(n), code=f"x = {n} if {n} == 0 else x + 1\nx") for n in range(4)]
    (step,) = played(quick(), calls)
    assert [m["content"] for m in step.messages] == ["0", "1", "2", "3"]


def test_a_cancelled_episode_ends_its_process(quick: ToolEnvs) -> None:
    async def cancelled() -> None:
        others = set(psutil.Process().children())
        episode = asyncio.create_task(play(quick(), [call("python", code="while True: pass")]))
        while not (started := set(psutil.Process().children()) - others):  # noqa: ASYNC110  # a process has no event
            await asyncio.sleep(0.01)
        (host,) = started
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await_end([host])

    asyncio.run(cancelled())
    assert _said(quick, "1") == ["1"]


def test_a_host_that_dies_is_a_failure_of_the_environment(quick: ToolEnvs) -> None:
    others = set(psutil.Process().children())
    assert _said(quick, "1") == ["1"]
    (host,) = set(psutil.Process().children()) - others
    host.kill()
    with pytest.raises(EnvError, match="the sandbox of the tool 'python' failed: its process has ended"):
        _said(quick, "1")
    assert _said(quick, "1") == ["1"]


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.envs.playing import call, play
from braid.envs.kinds import ToolsEnv
from braid.envs.agents.toolboxes import ToolEnvs

envs = ToolEnvs(ToolsEnv(kind="tools", tools=("python",), tool_timeout_s=300.0), Path())
code = "import time\\nwhile True: time.sleep(1)"
asyncio.run(play(envs(), [call("python", code="1")], [call("python", code=code)]))
"""


def test_no_process_outlives_a_killed_run() -> None:
    need_sandbox()
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    try:
        expected = 2 if find_isolation("auto") == "sandlock" else 3  # host, bubblewrap's process, Python
        started: list[psutil.Process] = []
        while len(started) < expected:
            assert run.poll() is None
            time.sleep(0.05)
            started = psutil.Process(run.pid).children(recursive=True)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    await_end(started)
