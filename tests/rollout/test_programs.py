"""User's programs: functions in threads, commands in processes, and what becomes of them at their
deadline."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import psutil
import pytest
from openai import OpenAI
from tests.driven import drive
from tests.rollout.test_sessions import EOS, TASK, TOKENIZER, ScriptedEngine, _client, _driver, _until

from braid.models.tokenizer import whole_text
from braid.processes import with_variable
from braid.rollout.sessions.programs import Program, run_command, run_function
from braid.types import Prompt, Status, Trajectory

USER: Any = {"role": "user", "content": "hello"}


def _play(program: Program, engine: Any = None, **more: Any) -> Trajectory:
    (group,) = drive(_driver(engine or ScriptedEngine(), program, **more), [TASK])
    return group.trajectories[0]


def test_a_function_may_block_or_be_a_coroutine() -> None:
    """Also a coroutine that blocks: the server does not wait for it."""

    def blocks(task: Prompt, base_url: str, api_key: str) -> float:
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            said = client.chat.completions.create(
                model="", messages=[{"role": "user", "content": task.fields["answer"]}]
            )
        return float(said.choices[0].message.content == "ok")

    async def awaits(task: Prompt, base_url: str, api_key: str) -> dict[str, float]:
        async with _client(base_url, api_key) as client:
            await client.chat.completions.create(model="", messages=[USER])
        return {"both": blocks(task, base_url, api_key)}

    for function, num_turns in ((blocks, 1), (awaits, 2)):
        trajectory = _play(partial(run_function, function))
        assert trajectory.reason == ""
        assert len(trajectory.turns) == num_turns
        assert trajectory.turns[-1].reward == 1.0


def test_programs_of_a_group_have_the_same_seed() -> None:
    seeds: list[int] = []

    def function(task: Prompt, base_url: str, api_key: str, seed: int) -> float:
        seeds.append(seed)
        return 1.0

    drive(_driver(ScriptedEngine(), partial(run_function, function), retries=1), [TASK] * 2, 3)
    assert len(seeds) == 2 * 3 * 2
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_coroutine_is_cancelled_at_its_deadline() -> None:
    ended = threading.Event()

    async def function(task: Prompt, base_url: str, api_key: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    trajectory = _play(partial(run_function, function), timeout_s=0.2)
    assert trajectory.reason == "program: took longer than env.episode_timeout_s=0.2"
    assert ended.wait(60)


def test_a_function_that_hangs_does_not_hold_up_the_run() -> None:
    ended = threading.Event()
    trajectory = _play(partial(run_function, lambda task, base_url, api_key: ended.wait()), timeout_s=0.2)
    ended.set()
    assert trajectory.status is Status.INVALID


PROGRAM = """
import json, os, sys
from openai import OpenAI

task = json.loads(os.environ["BRAID_TASK"])
client = OpenAI()
said = client.chat.completions.create(model="", messages=task["messages"])
right = said.choices[0].message.content == "ok" and task["fields"]["answer"] == "yes" and int(os.environ["BRAID_SEED"]) >= 0
print("a line that nobody reads")
client.post("/reward", body={"reward": float(right)}, cast_to=object)
"""


def test_a_command_plays_an_episode_by_its_environment(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    trajectory = _play(partial(run_command, [sys.executable, "agent.py"], tmp_path))
    assert (trajectory.status, trajectory.reason) == (Status.FINISHED, "")
    (turn,) = trajectory.turns
    assert (turn.output_ids[-1], turn.reward) == (EOS, 1.0)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (
            ["no-such-program"],
            "program: no-such-program ended with exit code 1\nno-such-program: No such file",
        ),
        (["sh", "-c", "echo one >&2; echo two >&2; exit 3"], "program: sh ended with exit code 3\none\ntwo"),
        (["sh", "-c", "kill -9 $$"], "program: sh ended with exit code -9"),
        (["true"], "program: ended without an answer of the policy"),
    ],
)
def test_a_command_that_fails_says_why(tmp_path: Path, argv: list[str], reason: str) -> None:
    assert _play(partial(run_command, argv, tmp_path)).reason.startswith(reason)


@pytest.mark.parametrize("ends", ["itself", "at the deadline", "when the run is interrupted"])
def test_a_command_leaves_no_processes(tmp_path: Path, ends: str) -> None:
    """Neither its children nor those that have left its session, or dropped its environment."""
    sleep = f"sleep {100_000 + os.getpid()}"
    script = f"""
        {sleep} &
        env -i {sleep} &
        setsid sh -c '{sleep}' &
        touch {tmp_path}/started
        {"exit 0" if ends == "itself" else "wait"}
    """
    keys: list[str] = []

    async def program(task: Prompt, base_url: str, api_key: str, seed: int) -> None:
        keys.append(api_key)
        await run_command(["sh", "-c", script], tmp_path, task, base_url, api_key, seed)

    async def interrupted() -> None:
        group = asyncio.create_task(_driver(ScriptedEngine(), program).group(TASK, 1, (0, 0)))
        await _until((tmp_path / "started").exists)
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)

    if ends == "when the run is interrupted":
        asyncio.run(interrupted())
    else:
        reason = _play(program, timeout_s=1000.0 if ends == "itself" else 0.5).reason
        assert ("took longer" in reason) == (ends == "at the deadline")
    (key,) = keys
    assert with_variable("OPENAI_API_KEY", key) == []
    assert [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == sleep.split()] == []


def test_smolagents_plays_an_episode_though_it_demands_calls_that_no_sampling_can_promise() -> None:
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed: make test")

    class Add(smolagents.Tool):  # type: ignore[name-defined,misc]
        name, description, output_type = "add", "Adds.", "integer"
        inputs: ClassVar = {
            "a": {"type": "integer", "description": "one"},
            "b": {"type": "integer", "description": "two"},
        }

        def forward(self, a: int, b: int) -> int:
            return a + b

    said = [
        "it is 5.",
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
        '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>',
    ]
    engine = ScriptedEngine(lambda _: said[len(engine.requests) - 1])

    def program(task: Prompt, base_url: str, api_key: str) -> float:
        with httpx2.Client(verify=False, trust_env=False) as http:
            client = {"http_client": http, "max_retries": 0}
            model = smolagents.OpenAIModel("policy", api_base=base_url, api_key=api_key, client_kwargs=client)
            agent = smolagents.ToolCallingAgent(tools=[Add()], model=model, max_steps=4, verbosity_level=0)
            return float(agent.run("How much is 2 + 3?") == "5")

    trajectory = _play(partial(run_function, program), engine=engine, max_context_tokens=30_000)
    assert (trajectory.status, trajectory.reason) == (Status.FINISHED, "")
    assert sum(turn.reward for turn in trajectory.turns) == 1.0
    asked = [whole_text(TOKENIZER, request.prompt_ids) for request in engine.requests]
    assert [whole_text(TOKENIZER, turn.output_ids) for turn in trajectory.turns] == [
        f"{text}<eos>" for text in said
    ]
    assert ("it is 5." in asked[1], "bservation:\n5" in asked[2]) == (True, True)
    counts = {
        name: trajectory.metrics[f"calls/{name}"] for name in ("missing", "ok", "add/ok", "final_answer/ok")
    }
    assert counts == {"missing": 1, "ok": 2, "add/ok": 1, "final_answer/ok": 1}
