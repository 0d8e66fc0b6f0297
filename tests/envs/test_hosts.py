"""Environments run on the event loop, in threads and in processes alike; a bad one costs only its own
episode."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from tests.envs import scripted
from tests.leftovers import LIMIT_S, await_end

from braid.envs.agents.base import Opening, Step
from braid.envs.agents.build import AgentEnvs
from braid.envs.agents.hosts import HostedEnv, ProcessEnv, RunIn
from braid.errors import ConfigError, EnvError
from braid.types import Action, Prompt

TASK = Prompt("test:0", "test", (1,), (), {"topic": "luck"})
ALL: tuple[RunIn, ...] = ("inline", "thread", "process")


_made: list[AgentEnvs] = []


@pytest.fixture(autouse=True)
def _closes_makers(nothing_is_left: None) -> Iterator[None]:
    yield
    while _made:
        asyncio.run(_made.pop().close())


def maker(
    run_in: RunIn,
    num: int = 1,
    name: str = "tests.envs.scripted.Scripted",
    base_dir: Path = Path(),
    **kwargs: object,
) -> AgentEnvs:
    _made.append(AgentEnvs(name, kwargs, base_dir, run_in, num))
    return _made[-1]


async def play(env: HostedEnv, says: Sequence[str], seed: int = 3) -> list[Opening | Step]:
    """The whole episode."""
    try:
        episode: list[Opening | Step] = [await env.start(TASK, seed)]
        episode += [await env.step(Action(text)) for text in says]
    finally:
        await env.close()
    return episode


def said(step: Opening | Step) -> str:
    """The last word of the environment's reply."""
    return step.messages[0]["content"].split()[-1]


@pytest.fixture
def released() -> Iterator[None]:
    """Ends calls that hang in threads."""
    scripted.RELEASED.clear()
    yield
    scripted.RELEASED.set()


@pytest.mark.parametrize("name", ["Scripted", "AsyncScripted"])
def test_an_episode_is_the_same_wherever_it_runs(name: str) -> None:
    first, *others = (
        asyncio.run(play(maker(run_in, name=f"tests.envs.scripted.{name}", word="w")(), ["", "print", "end"]))
        for run_in in ALL
    )
    assert others == [first] * 2
    assert "luck w" in first[0].messages[0]["content"]


def test_global_random_numbers_and_sets_of_processes_depend_on_the_seed_only() -> None:
    async def beside() -> list[list[Opening | Step]]:
        make = maker("process", 2)
        return await asyncio.gather(*(play(make(), ["draw", "set"] * 3, seed=5 + i % 2) for i in range(5)))

    alone = asyncio.run(play(maker("process")(), ["draw", "set"] * 3, seed=5))
    episodes = asyncio.run(beside())
    assert episodes[::2] == [alone] * 3
    assert episodes[1] == episodes[3] != alone


@pytest.mark.parametrize("run_in", ["thread", "process"])
@pytest.mark.usefixtures("released")
def test_a_call_that_hangs_costs_its_deadline_and_no_other_episode(run_in: RunIn) -> None:
    async def episodes() -> tuple[list[Opening | Step], str]:
        make = maker(run_in, 2)
        bad, good = make(), make()
        await bad.start(TASK, 3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await bad.step(Action("hang"))
        episode = await play(good, ["", "end"])
        await bad.close()  # does not wait for the call
        again = await play(make(), ["pid"])
        return episode, said(again[-1])

    episode, _ = asyncio.run(episodes())
    assert episode == asyncio.run(play(maker("inline")(), ["", "end"]))


def test_a_process_that_hangs_is_killed_with_what_it_started() -> None:
    async def episode() -> list[psutil.Process]:
        make = maker("process")
        env = make()
        await env.start(TASK, 3)
        pids = [int(said(await env.step(Action(what)))) for what in ("pid", "spawn")]
        processes = [psutil.Process(pid) for pid in pids]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await env.step(Action("hang"))
        await asyncio.to_thread(await_end, processes)
        await env.close()
        assert int(said((await play(make(), ["pid"]))[-1])) not in pids
        return processes

    asyncio.run(episode())


@pytest.mark.parametrize(
    ("says", "how"),
    [("die", "exited with code 7"), ("segfault", "was killed by SIGSEGV")],
)
def test_a_process_that_ends_costs_its_own_episode(says: str, how: str) -> None:
    async def episodes() -> str:
        make = maker("process", 2)
        good = make()
        await good.start(TASK, 3)
        with pytest.raises(EnvError, match=how) as raised:
            await play(make(), [says])
        assert said(await good.step(Action(""))) == "1"
        await good.close()
        await play(make(), ["end"])
        return str(raised.value)

    message = asyncio.run(episodes())
    assert {"die": "out of luck", "segfault": "in _segfault"}[says] in message


@pytest.mark.parametrize("run_in", ALL)
@pytest.mark.parametrize(
    ("says", "kind"), [("raise", "ValueError: no such thing"), ("stop", "StopIteration")]
)
def test_an_exception_is_an_env_error_that_names_its_line(run_in: RunIn, says: str, kind: str) -> None:
    with pytest.raises(EnvError, match=rf"{kind}.*\(scripted\.py:\d+\)"):
        asyncio.run(play(maker(run_in)(), [says]))


@pytest.mark.parametrize("run_in", ALL)
def test_an_environment_cannot_exit_the_run(run_in: RunIn) -> None:
    with pytest.raises(EnvError, match="SystemExit: leaving"):
        asyncio.run(play(maker(run_in)(), ["exit"]))


@pytest.mark.parametrize("run_in", ALL)
def test_a_refused_config_is_no_failure_of_the_environment(run_in: RunIn) -> None:
    with pytest.raises(ConfigError, match="refused"):
        asyncio.run(play(maker(run_in, refuses=True)(), []))


def test_a_process_is_used_again_unless_something_failed_in_it() -> None:
    async def episodes() -> list[str]:
        make, pids = maker("process"), []
        for says in ("end", "", "raise", ""):
            env = make()
            await env.start(TASK, 3)
            pids.append(said(await env.step(Action("pid"))))
            try:
                await env.step(Action(says))
            except EnvError:
                assert says == "raise"
            await env.close()
            await env.close()
        return pids

    first, second, third, fourth = asyncio.run(episodes())
    assert first == second == third != fourth


def test_an_episode_waits_for_a_process_before_its_start() -> None:
    async def episodes() -> None:
        make = maker("process")
        first, cancelled, last = make(), make(), make()
        await first.ready()
        waiting = [asyncio.create_task(env.ready()) for env in (cancelled, last)]
        await asyncio.wait(waiting, timeout=0.01)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        await first.close()
        await waiting[1]
        await cancelled.close()
        await play(last, ["end"])
        await play(make(), ["end"])

    asyncio.run(episodes())


def test_a_place_that_is_given_to_a_cancelled_episode_goes_to_the_next() -> None:
    async def episodes() -> None:
        make = maker("process")
        first, cancelled, last = make(), make(), make()
        await first.ready()
        waiting = [asyncio.create_task(env.ready()) for env in (cancelled, last)]
        await asyncio.sleep(0)
        await first.close()  # the place is given to the first that waits, which has not run since
        waiting[0].cancel()
        await waiting[1]
        await last.close()

    asyncio.run(episodes())


def test_processes_survive_the_event_loop_and_interrupts_and_import_little() -> None:
    make = maker("process")
    pid = said(asyncio.run(play(make(), ["pid"]))[-1])
    os.kill(int(pid), signal.SIGINT)
    again = asyncio.run(play(make(), ["pid", "modules"]))
    assert said(again[-2]) == pid
    assert again[-1].messages[0]["content"] == "2 "
    assert os.getsid(int(pid)) != os.getsid(0), "a terminal's Ctrl-C does not reach it"


def test_an_idle_process_that_died_is_replaced() -> None:
    make = maker("process")
    pid = int(said(asyncio.run(play(make(), ["pid"]))[-1]))
    process = psutil.Process(pid)
    process.kill()
    process.wait(LIMIT_S)
    assert said(asyncio.run(play(make(), ["pid"]))[-1]) != str(pid)


def test_processes_end_with_a_parent_that_is_killed() -> None:
    code = (
        "import asyncio; from tests.envs.test_hosts import *\n"
        "async def episode():\n"
        "    env = maker('process')(); await env.start(TASK, 3)\n"
        "    print(*[said(await env.step(Action(what))) for what in ('pid', 'spawn')], flush=True)\n"
        "    await env.step(Action('hang'))\n"
        "asyncio.run(episode())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(processes) == 2
    parent.kill()
    parent.wait(LIMIT_S)
    parent.stdout.close()
    await_end(processes)


@pytest.mark.parametrize("run_in", ALL)
def test_steps_are_refused_before_the_start_and_after_the_end(run_in: RunIn) -> None:
    async def episode() -> None:
        env = maker(run_in)()
        with pytest.raises(EnvError, match="before the start or after the end"):
            await env.step(Action(""))
        await env.start(TASK, 3)
        await env.step(Action("end"))
        with pytest.raises(EnvError, match="before the start or after the end"):
            await env.step(Action(""))
        await env.close()

    asyncio.run(episode())


def test_anything_but_a_step_is_refused() -> None:
    with pytest.raises(EnvError, match=r"step\(\) returned str, not Step"):
        asyncio.run(play(maker("inline", name="tests.envs.scripted.Wrong")(), [""]))


@pytest.mark.parametrize("run_in", ALL)
def test_a_close_that_fails_is_told_once(run_in: RunIn) -> None:
    async def episode() -> None:
        env = maker(run_in, word="bad close")()
        with pytest.raises(EnvError, match="cannot close"):
            await play(env, [])
        await env.close()

    asyncio.run(episode())


@pytest.mark.usefixtures("released")
def test_a_thread_closes_its_environment_when_the_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def episode() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        monkeypatch.setattr(scripted.Scripted, "close", lambda _: loop.call_soon_threadsafe(done.set))
        env = maker("thread")()
        await env.start(TASK, 3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await env.step(Action("hang"))
        await env.close()
        assert not done.is_set()
        scripted.RELEASED.set()
        await asyncio.wait_for(done.wait(), LIMIT_S)

    asyncio.run(episode())


def test_methods_decide_where_an_environment_runs() -> None:
    def host(name: str) -> str:
        return type(AgentEnvs(f"tests.envs.scripted.{name}", {}, Path())()).__name__

    assert (host("Scripted"), host("AsyncScripted")) == ("ThreadEnv", "InlineEnv")
    assert isinstance(AgentEnvs("reasoning_gym", {}, Path())(), ProcessEnv)


def test_an_environment_can_be_in_a_file_also_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.envs.scripted import Scripted\nclass Mine(Scripted):\n    pass\n"
    )
    episodes = [
        asyncio.run(play(maker(run_in, name="mine.py:Mine", base_dir=tmp_path, word="w")(), [""]))
        for run_in in ALL
    ]
    assert episodes == episodes[:1] * 3


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("gues", {}, "did you mean 'guess'"),
        ("guess", {"trys": 3}, "unexpected keyword argument 'trys'"),
        ("mine.py:Mine", {}, "no such file"),
        ("tests.envs.scripted.Scriptd", {}, "did you mean 'Scripted'"),
    ],
)
def test_a_wrong_name_or_argument_is_named(name: str, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentEnvs(name, kwargs, Path())


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.delitem(sys.modules, "braid.envs.agents.adapters.textarena_env", raising=False)
    with pytest.raises(ConfigError, match=r"textarena.*pip install 'braid-rl\[textarena\]'"):
        AgentEnvs("textarena", {"id": "TicTacToe-v0"}, Path())
