"""Runs with agent environments and tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from braid.report.samples import read_samples
from braid.trainer import commands

from .conftest import LoadTiny
from .test_features import equal, numbers
from .test_filters import weights
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
DUEL = """
from braid.envs.agents.base import Outcome

class Duel:
    '''The higher of two numbers wins.'''
    agents = ("one", "two")
    async def run(self, task, seed, seats):
        said = [(await seats[name].reply([{"role": "user", "content": "?"}])).text for name in self.agents]
        one, two = (int(text) if text in ("1", "2", "3") else 0 for text in said)
        return Outcome(rewards={"one": (one > two) - (one < two), "two": (two > one) - (two < one)},
                       metrics={"highest": (one == 3) + (two == 3)})
    async def close(self):
        pass
"""
AGENT = (
    "env={kind: agent, name: 'own.py:Guess', max_turns: 2, max_context_tokens: 16, cut_turns: continue, "
    "tasks: 64, eval_episodes: 20}",
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
    assert equal(weights(runs[0]), weights(runs[1]))


@pytest.mark.slow
@pytest.mark.nightly
def test_an_environment_of_ones_own_is_learned(load_tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = commands.train(load_tiny(*AGENT, "run.max_rounds=60", "train.optimizer.lr=5e-3")).run_dir
    first, last = lines(run)[1], lines(run)[-1]
    assert first["reward/mean"] < 0.6
    assert last["reward/mean"] > 0.85, "random play within what is possible finds 0.78"
    assert 1 <= last["env/tries"] <= 3


@pytest.mark.slow
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


def with_opponents(folder: Path, every: int) -> list[str]:
    """Overrides for duels with a frozen opponent."""
    (folder / "own.py").write_text(DUEL.replace("    async", "    opponents = ('two',)\n    async", 1))
    opponents = f"opponents: {{every_rounds: {every}}}, max_turns"
    agent = [key.replace("Guess", "Duel").replace("max_turns", opponents) for key in AGENT]
    return [*agent, "report={samples_every_rounds: 1}", "eval={at_end: false}"]


def opponent_versions(run_dir: Path, number: int) -> set[int]:
    """Versions of the weights that opponents had in a round."""
    samples = read_samples(run_dir / "samples" / f"round_{number:06d}.jsonl")
    segments = [segment for sample in samples for segment in sample.trajectory.segments]
    return {int(s.turns[0].policy_version) for s in segments if s.agent == "two"}


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_opponents_have_earlier_weights_also_after_a_resume(
    load_tiny: LoadTiny, tmp_path: Path, every: int
) -> None:
    """Cut in round 3, between two updates of the opponent."""
    agent = with_opponents(tmp_path, every)
    whole = commands.train(load_tiny(*agent, "run={name: whole, max_rounds: 5}")).run_dir
    commands.train(load_tiny(*agent, "run={name: cut, max_rounds: 3}"))
    cut = commands.train(load_tiny(*agent, "run={name: cut, max_rounds: 5, resume: latest}")).run_dir
    assert numbers(cut) == numbers(whole)
    versions = {0: [0, 0, 0, 0, 0], 2: [0, 0, 2, 2, 4]}[every]
    for number, version in enumerate(versions, start=1):
        samples = list(read_samples(whole / "samples" / f"round_{number:06d}.jsonl"))
        segments = [segment for sample in samples for segment in sample.trajectory.segments]
        assert {(s.agent, s.is_trained, s.turns[0].policy_version) for s in segments} == {
            ("one", True, number - 1),
            ("two", False, version),
        }


def test_several_agents_train_together_in_a_mixture(load_tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN + PAIR)
    mix = "mix: {pair: {name: 'own.py:Signals'}, alone: {name: 'own.py:Guess', max_turns: 1}}"
    agent = [key.replace("name: 'own.py:Guess'", mix).replace("123hl?", "1234hl?") for key in AGENT]
    run = commands.train(load_tiny(*agent, "run.max_rounds=2")).run_dir
    for line in lines(run)[-2:]:
        assert 1 < line["rollout/turns_mean"] < 2
        assert line["status/invalid"] == 0
        assert line["policy/grad_norm"] > 0
        assert 0 < line["env/mix/alone/truncated/environment"] <= 1
        assert 0 <= line["env/mix/alone/reply_p50_s"] <= line["env/reply_p99_s"]
        assert "env/mix/pair/tries" not in line


@pytest.mark.slow
@pytest.mark.nightly
def test_opponents_of_a_pipelined_run_are_those_of_the_loop_on_policy(
    load_tiny: LoadTiny, tmp_path: Path
) -> None:
    """To the bit at lag 0, also after a resume. Above it the lag counts the tokens that are trained."""
    agent = with_opponents(tmp_path, 2)
    whole = commands.train(load_tiny(*agent, "run={name: whole, max_rounds: 5}")).run_dir
    agent.append("pipeline.max_lag=0")
    commands.train(load_tiny(*agent, "run={name: cut, max_rounds: 3}"))
    cut = commands.train(load_tiny(*agent, "run={name: cut, max_rounds: 5, resume: latest}")).run_dir
    shown = [{k: v for k, v in line.items() if not k.startswith("pipeline/")} for line in numbers(cut)]
    assert shown == numbers(whole)
    assert equal(weights(cut), weights(whole))
    for when in ("finish", "interrupt"):
        pipeline = f"pipeline={{max_lag: 1, on_new_weights: {when}}}"
        ahead = commands.train(
            load_tiny(*agent[:-1], pipeline, f"run={{name: {when}, max_rounds: 6}}")
        ).run_dir
        assert [max(opponent_versions(ahead, number)) for number in (2, 4, 6)] == [0, 2, 4]
        assert set().union(*(opponent_versions(ahead, number) for number in range(1, 7))) == {0, 2, 4}
        assert max(line["pipeline/lag_max"] for line in lines(ahead)[1:]) <= 1


@pytest.mark.slow
@pytest.mark.nightly
def test_a_zero_sum_game_against_itself_is_learned(load_tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(DUEL)
    agent = [key.replace("Guess", "Duel") for key in AGENT]
    run = commands.train(load_tiny(*agent, "run.max_rounds=25", "train.optimizer.lr=5e-3")).run_dir
    assert lines(run)[1]["env/highest"] < 1
    last = lines(run)[-1]
    assert last["env/highest"] > 1.5, "the optimum is 2; an untrained policy has 0.5"
    assert last["reward/mean"] == 0
    assert last["env/reward/one"] == -last["env/reward/two"]
