"""Runs with agent environments and tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from braid.trainer import commands

from .conftest import LoadTiny
from .test_features import numbers
from .test_runs import lines

SERVER = Path(__file__).parents[1] / "envs" / "mcp_calculator.py"
TOOLS = '''
def calc(expression: str) -> str:
    """Evaluate an expression.

    Args:
        expression: For example 2*3.
    """
    from braid.envs.agents.calculator import calculator
    return calculator(expression)
'''
CALC = {
    "name": "calc",
    "description": "Evaluate an expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
OWN = """
import random
from braid.envs.agents.base import Opening, Step

class Guess:
    '''Of three numbers in two turns: the middle one first is always right.'''
    def start(self, task, seed):
        self.number, self.left = random.Random(seed).randint(1, 3), 2
        return Opening([{"role": "user", "content": "?"}])
    def step(self, action):
        self.left -= 1
        guess = int(action.text) if action.text in "123" and action.text else 0
        if guess == self.number:
            return Step(reward=1.0, is_done=True, metrics={"tries": 2 - self.left})
        hint = "h" if guess < self.number else "l"
        return Step([{"role": "user", "content": hint}], is_done=not self.left, metrics={"tries": 2 - self.left})
    def close(self):
        pass
"""
PAIR = """
import random
from braid.envs.agents.base import Outcome

class Signals:
    '''The sender sees one of four targets and has two signals; the receiver guesses the target from the signal.'''
    agents = ("sender", "receiver")
    async def run(self, task, seed, seats):
        target = random.Random(seed).choice("1234")
        sent = await seats["sender"].reply([{"role": "user", "content": target}])
        signal = sent.text if sent.text in ("h", "l") else "?"
        guess = await seats["receiver"].reply([{"role": "user", "content": signal}])
        return Outcome(float(guess.text == target))
    async def close(self):
        pass
"""
AGENT = (
    "env={kind: agent, name: 'own.py:Guess', max_turns: 2, max_context_tokens: 16, cut_turns: continue, tasks: 64, "
    "eval_episodes: 20}",
    "model.build.characters='123hl?'",
    "data={}",
    "reward={}",
    "rollout={prompts_per_round: 16, group_size: 16, sampling: {max_new_tokens: 1}}",
)


@pytest.mark.slow
def test_a_tool_is_the_same_as_a_function_and_from_an_mcp_server(load_tiny: LoadTiny, tmp_path: Path) -> None:
    """The policy has one token for each tag, so that an untrained one calls the tool now and then."""
    (tmp_path / "tools.py").write_text(TOOLS)
    server = f"{{command: {sys.executable}, args: [{SERVER}, '{json.dumps(CALC)}']}}"
    runs = [
        commands.train(
            load_tiny(
                f"env={{kind: tools, tools: [{tool}], max_turns: 3, max_context_tokens: 60}}",
                "model.build.characters='abcd12+<>out/erolin:*'",
                "model.build.special_tokens=['<calc>', '</calc>']",
                "rollout={prompts_per_round: 4, group_size: 32, sampling: {max_new_tokens: 8}}",
                "data.max_prompt_tokens=8",
                "run={max_rounds: 2, if_exists: new}",
            )
        ).run_dir
        for tool in ("'tools.py:calc'", server)
    ]
    assert lines(runs[0])[-1]["env/calls/ok"] > 0
    assert numbers(runs[0]) == numbers(runs[1])


@pytest.mark.slow
def test_an_environment_of_ones_own_is_learned(load_tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = commands.train(load_tiny(*AGENT, "run.max_rounds=60", "train.optimizer.lr=5e-3")).run_dir
    first, last = lines(run)[1], lines(run)[-1]
    assert first["reward/mean"] < 0.6
    assert last["reward/mean"] > 0.85, "random play within what is possible finds 0.78"
    assert 1 <= last["env/tries"] <= 3


def test_a_run_of_agents_resumes_bit_exactly(load_tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    whole = commands.train(
        load_tiny(*AGENT, "run={name: whole, max_rounds: 4}", "eval={at_end: false}")
    ).run_dir
    commands.train(load_tiny(*AGENT, "run={name: cut, max_rounds: 2}", "eval={at_end: false}"))
    cut = commands.train(
        load_tiny(*AGENT, "run={name: cut, max_rounds: 4, resume: latest}", "eval={at_end: false}")
    ).run_dir
    assert numbers(cut) == numbers(whole)


def test_several_agents_train_together(load_tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PAIR)
    agent = [key.replace("Guess", "Signals").replace("123hl?", "1234hl?") for key in AGENT]
    run = commands.train(load_tiny(*agent, "run.max_rounds=2")).run_dir
    for line in lines(run)[-2:]:
        assert line["rollout/turns_mean"] == 2
        assert line["status/invalid"] == 0
        assert line["policy/grad_norm"] > 0
