"""A run killed in the middle of episodes and resumed ends with the same bits as an uninterrupted one: every
random number of an episode follows from its place in the run, wherever its environment or program runs."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.resume.test_kill_and_resume import numbers, start, weight_hashes

from braid.report.samples import read_samples

KILLS = (7, 40, 70)
"""Turns after which the run is killed, since it was started or resumed."""
PLAY = '''
import os, random, signal, threading
from pathlib import Path

from braid.envs.agents.base import Opening, Step

HERE = Path(__file__).parent

def count():
    """Count a turn, and kill the run after the last that it may play."""
    with (HERE / "turns").open("a") as turns:
        turns.write(".")
    if (HERE / "kill").exists():
        pid, after = map(int, (HERE / "kill").read_text().split())
        if (HERE / "turns").stat().st_size >= after:
            os.kill(pid, signal.SIGKILL)
            threading.Event().wait()

class Guess:
    """Guess a letter within three turns."""
    def __init__(self, uses_globals=False):
        self.uses_globals = uses_globals
    def start(self, task, seed):
        self.random = random if self.uses_globals else random.Random(seed)
        self.letter, self.left = self.random.choice("abc"), 3
        return Opening([{"role": "user", "content": "?"}])
    def step(self, action):
        count()
        self.left -= 1
        if action.text == self.letter:
            return Step(reward=1.0, is_done=True)
        hint = self.random.choice("hl")
        return Step([{"role": "user", "content": hint}], is_done=not self.left)
    def close(self):
        pass

def play(task, base_url, api_key, seed):
    import json
    from urllib.request import Request, urlopen

    letter, said = random.Random(seed).choice("abc"), [dict(message) for message in task.messages]
    for _ in range(3):
        body = json.dumps({"messages": said}).encode()
        headers = {"authorization": "Bearer " + api_key}
        answer = json.load(urlopen(Request(base_url + "/chat/completions", body, headers)))
        count()
        message = answer["choices"][0]["message"]
        if message["content"] == letter:
            return 1.0
        said += [message, {"role": "user", "content": "h"}]
    return 0.0
'''
STEPPED: dict[str, Any] = {
    "kind": "agent", "name": "own.py:Guess", "max_turns": 3, "max_context_tokens": 16, "cut_turns": "continue",
    "tasks": 64, "eval_episodes": 8,
}  # fmt: skip
ENVS: dict[str, dict[str, Any]] = {
    "thread": STEPPED | {"run_in": "thread"},
    "process": STEPPED | {"run_in": "process", "kwargs": {"uses_globals": True}},
    "program": {"kind": "program", "program": "own.py:play", "max_context_tokens": 16},
}


def _config(env: dict[str, Any]) -> dict[str, Any]:
    asks = [{"kind": "file", "name": "asks", "path": "asks.jsonl"}]
    return {
        "run": {"name": "tiny", "max_rounds": 3, "num_threads": 1, "device": "cpu"},
        "model": {
            "build": {
                "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
                "head_dim": 16, "characters": "abchl?",
            }
        },
        "env": env,
        "data": {"train": asks, "eval": asks, "max_prompt_tokens": 8} if env["kind"] == "program" else {},
        "reward": {},
        "rollout": {"prompts_per_round": 4, "group_size": 4, "sampling": {"max_new_tokens": 1}},
        "train": {"optimizer": {"lr": 1e-3}},
        "checkpoint": {"every_rounds": 1},
        "report": {"console": "none", "samples_every_rounds": 1},
    }  # fmt: skip


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "own.py").write_text(PLAY)
    (path / "asks.jsonl").write_text('{"prompt": "?", "answer": ""}\n' * 4)
    return path


def _samples(run: Path) -> list[dict[str, Any]]:
    """Every sample without its times."""
    samples = []
    for file in sorted((run / "samples").glob("*.jsonl")):
        for sample in read_samples(file):
            trajectory = sample.trajectory
            turns = [
                {f.name: getattr(turn, f.name) for f in dataclasses.fields(turn) if not f.name.endswith("_s")}
                for turn in trajectory.turns
            ]
            metrics = {k: v for k, v in trajectory.metrics.items() if not k.endswith("_s")}
            samples.append(
                {"file": file.name, "uid": trajectory.prompt.uid, "sample": trajectory.sample, "turns": turns,
                 "reward": trajectory.reward, "status": trajectory.status, "metrics": metrics}
            )  # fmt: skip
    return samples


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "program")) for name in ENVS]
)
def test_a_run_killed_in_the_middle_of_episodes_equals_the_uninterrupted_run(
    tmp_path: Path, where: str
) -> None:
    config = _config(ENVS[where])
    unbroken, broken = _folder(tmp_path / "unbroken"), _folder(tmp_path / "broken")
    whole = start(unbroken, config=config)
    whole.join()
    assert whole.exitcode == 0
    for turns in KILLS:
        (broken / "turns").unlink(missing_ok=True)
        killed = start(broken, "run.resume=latest", config=config)
        (broken / "next").write_text(f"{killed.pid} {turns}")
        (broken / "next").rename(broken / "kill")
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
        (broken / "kill").unlink()
    last = start(broken, "run.resume=latest", config=config)
    last.join()
    assert last.exitcode == 0
    runs = [folder / "runs" / "tiny" for folder in (broken, unbroken)]
    for equal in (numbers, weight_hashes, _samples):
        resumed, expected = map(equal, runs)
        assert resumed == expected
        assert resumed
