"""Runs whose episodes are played by programs."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from braid.errors import ConfigError
from braid.report.samples import read_samples
from braid.trainer import commands

from .conftest import LoadTiny, check
from .test_features import numbers
from .test_runs import lines

FUNCTION = """
from openai import DefaultHttpxClient, OpenAI

def play(task, base_url, api_key):
    with OpenAI(base_url=base_url, api_key=api_key, http_client=DefaultHttpxClient(verify=False)) as client:
        said = client.chat.completions.create(model="", messages=task.messages)
    return {"right": said.choices[0].message.content == task.fields["answer"], "said": 0.5}
"""
COMMAND = """
import json, os
from urllib.request import Request, urlopen

def post(path, body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + path
    return json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))

task = json.loads(os.environ["BRAID_TASK"])
said = post("/chat/completions", {"messages": task["messages"]})["choices"][0]["message"]["content"]
post("/reward", {"reward": float(said == task["fields"]["answer"])})
"""


def test_a_function_plays_the_episodes_of_training_and_evaluation(
    load_tiny: LoadTiny, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(FUNCTION)
    env = "env={kind: program, max_context_tokens: 2000, program: 'agent.py:play'}"
    loaded = load_tiny(env, "reward.parts=[]", "run.max_rounds=2", "run.if_exists=new")
    run, again = (commands.train(loaded).run_dir for _ in range(2))
    assert numbers(run) == numbers(again), "whatever the order of calls"
    for line in lines(run)[-2:]:
        assert line["rollout/turns_mean"] == 1
        assert line["reward/mean"] == pytest.approx(line["env/reward/right"] + 0.5)
    samples = list(read_samples(next((run / "samples").glob("eval_*.jsonl"))))
    assert {sample.trajectory.reward for sample in samples} <= {0.5, 1.5}


def test_a_command_plays_the_episodes_of_a_pipelined_run(load_tiny: LoadTiny, tmp_path: Path) -> None:
    """The sampling loop then runs in a thread."""
    (tmp_path / "agent.py").write_text(COMMAND)
    run = commands.train(
        load_tiny(
            "env={kind: program, max_context_tokens: 2000, program: [python3, agent.py]}",
            "data.eval=[]",
            "reward.parts=[]",
            "run.max_rounds=2",
            "pipeline.max_lag=1",
            "rollout.prompts_per_round=2",
            "rollout.group_size=2",
        )
    ).run_dir
    assert [line["rollout/turns_mean"] for line in lines(run)[-2:]] == [1, 1]


def _play_elsewhere(port: int, key: str, is_over: threading.Event, played: list[str]) -> None:
    """What a program on another machine does: ask for episodes, play and end them."""
    url = f"http://127.0.0.1:{port}/v1"

    def post(path: str, key: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        with urlopen(Request(url + path, json.dumps(body or {}).encode(), headers)) as answer:
            return json.load(answer)

    while not is_over.is_set():
        try:
            episode = post("/episodes", key)
            if episode["task"] is None:
                continue
            played.append(episode["task"]["uid"])
            said = post("/chat/completions", episode["api_key"], {"messages": episode["task"]["messages"]})
            assert said["choices"]
            post("/reward", episode["api_key"], {"reward": 0.25})
            post("/end", episode["api_key"])
        except HTTPError:
            raise
        except (URLError, ConnectionError):  # it does not listen, yet or any more
            time.sleep(0.01)


def test_programs_elsewhere_ask_for_episodes(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    key, played, is_over = "0123456789abcdef", [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = f"env={{kind: program, max_context_tokens: 2000, program: external, port: {port}}}"
    settings = (env, "reward.parts=[]", "run.max_rounds=1", "data.eval=[]")
    with pytest.raises(
        ConfigError, match="at least 16 characters in the environment variable BRAID_EXTERNAL"
    ):
        check(load_tiny(*settings))
    monkeypatch.setenv("BRAID_EXTERNAL_KEY", key)
    programs = [
        threading.Thread(target=_play_elsewhere, args=(port, key, is_over, played), daemon=True)
        for _ in range(3)
    ]
    for program in programs:
        program.start()
    run = commands.train(load_tiny(*settings)).run_dir
    is_over.set()
    for program in programs:
        program.join()
    (line,) = lines(run)[-1:]
    assert line["reward/mean"] == 0.25
    assert line["rollout/trajectories"] == len(played)
    with pytest.raises(ConfigError, match=r"env\.port: external programs have to know the port"):
        check(load_tiny(*settings, "env.port=0"))


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("[no-such-agent, x]", "no such command: 'no-such-agent'"),
        ("agent.py:play", "no such file"),
    ],
)
def test_a_missing_program_is_an_error_of_the_config(load_tiny: LoadTiny, program: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        check(load_tiny(f"env={{kind: program, max_context_tokens: 2000, program: {program}}}"))
    assert "env.program" in str(error.value)
