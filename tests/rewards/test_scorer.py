from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.envs.odd import NUMBERS, RAISED
from tests.leftovers import LIMIT_S

from braid.errors import ConfigError
from braid.rewards.scorer import Scorer
from braid.types import EnvSteps, Segment, Status, Trajectory, Turn

Answered = Callable[..., Trajectory]
Score = Callable[..., list[Trajectory]]

FUNCTIONS = """
import asyncio, threading, time
import numpy, torch

CALLS = []
RELEASE = threading.Event()

def length(text):
    return len(text)

def offered(text, answer, prompt, fields, trajectory, bonus=0.0):
    assert prompt == "the task" and fields["answer"] == answer and trajectory.answer_text == text
    return float(text == answer) + bonus

def everything(**given):
    names = ["answer", "difficulty", "fields", "k", "prefill", "prompt", "reasoning", "response", "text", "trajectory"]
    return float(sorted(given) == names)

def column(text, difficulty, level=1.0, missing=0.5):
    return difficulty * level + missing

def needs(txt):
    return 1.0

def shortest(text, difficulty, **rest):
    CALLS.append(len(text))
    assert rest["answer"] == ["42"] * len(text) and difficulty == [3] * len(text)
    return [float(len(one) == min(map(len, text))) for one in text]

def of_a_group(text):
    return {"few": [1.0], "nan": [1.0, float("nan")], "text": "12", "none": None, "numbers": iter([0.5, 2])}[text[0]]

def spoken(prefill, text, reasoning, response):
    return float((prefill, text, reasoning, response) == ("<think>\\n", "1?</think>\\n\\n2", "1?", "2"))

async def later(text):
    await asyncio.sleep(0.001)
    return len(text)

def returning(fields):
    return {"nan": float("nan"), "inf": float("inf"), "string": "1.0", "none": None, "true": True,
            "float32": numpy.float32(0.5), "tensor": torch.tensor(0.25), "list": [1.0],
            "array": numpy.ones(1)}[fields["what"]]

def raising(text):
    if text == "bad":
        raise ValueError("cannot judge this")
    if text == "leave":
        raise SystemExit(3)
    if text == "late":
        raise TimeoutError("of my own")
    return 1.0

async def raising_later(text):
    return raising(text)

def second_time(text):
    CALLS.append(text)
    if CALLS.count(text) < 2:
        raise ConnectionError("not now")
    return 1.0

def hanging(text):
    if text == "hang":
        RELEASE.wait(300)
    return 1.0

async def hanging_later(text):
    if text == "hang":
        await asyncio.sleep(1000)
    return 1.0

async def blocking(text):
    if text == "hang":
        RELEASE.wait(300)
    return 1.0
"""


def _function(name: str, **params: Any) -> dict[str, Any]:
    return {"kind": "function", "name": name, "path": f"rewards.py:{name}", "params": params}


@pytest.fixture(autouse=True)
def functions(tmp_path: Path) -> Iterator[None]:
    """The functions in a file next to the config. Afterwards, hanging calls are released."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    yield
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(tmp_path / "rewards.py"):
            module.RELEASE.set()


def test_the_reward_is_the_weighted_sum_of_the_parts_and_the_turns(answered: Answered, score: Score) -> None:
    trajectory = answered("42", answer="42")
    trajectory.segments = [Segment([Turn([1], [2], [-1.0], "stop", 0, reward=r)]) for r in (0.25, 0.5)]
    score([trajectory], {"kind": "exact", "weight": 2.0}, {**_function("length"), "weight": -0.5})
    assert trajectory.reward_parts == {"exact": 1.0, "length": 2.0}
    assert trajectory.reward == 2.0 - 1.0 + 0.75


def test_a_function_gets_the_turn_as_it_was_written_and_its_parts(answered: Answered, score: Score) -> None:
    trajectory = answered("2", prefill="<think>\n", sampled="1?</think>\n\n2", reasoning="1?")
    (scored,) = score([trajectory], _function("spoken"))
    assert scored.reward == 1.0


def test_without_parts_the_reward_is_that_of_the_environment(answered: Answered, score: Score) -> None:
    text, simulator = answered("x"), answered("")
    simulator.env_steps = EnvSteps(
        observations={"state": np.zeros((4, 1), np.float32)},
        inputs={"actions": np.zeros((3, 1))},
        logprobs=np.zeros((3, 1), np.float32),
        rewards=np.array([[1], [1], [0.5]], np.float32),
        num_executed=np.ones(3, np.int32),
        policy_version=0,
    )
    score([text, simulator])
    assert (text.reward, simulator.reward) == (0.0, 2.5)


def test_a_non_finite_reward_of_an_environment_is_invalid(answered: Answered, score: Score) -> None:
    trajectory = answered("x")
    trajectory.segments = [Segment([Turn([1], [2], [-1.0], "stop", 0, reward=float("nan"))])]
    score([trajectory])
    assert (trajectory.reward, trajectory.status) == (None, Status.INVALID)
    assert trajectory.reason == "reward sum: nan, from {} and nan of the environment"


def test_invalid_trajectories_are_not_scored(answered: Answered, score: Score) -> None:
    trajectory = answered("42", answer="42")
    trajectory.invalidate("env: broke")
    score([trajectory], {"kind": "exact"})
    assert (trajectory.reward, trajectory.reason, trajectory.reward_parts) == (None, "env: broke", {})


def test_a_truncated_trajectory_is_scored(answered: Answered, score: Score) -> None:
    trajectory = answered("42", answer="42")
    trajectory.status = Status.TRUNCATED
    score([trajectory], {"kind": "exact"})
    assert (trajectory.reward, trajectory.status) == (1.0, Status.TRUNCATED)


def test_a_function_gets_what_it_declares(answered: Answered, score: Score) -> None:
    trajectories = [answered(text, answer="42", difficulty=3) for text in ("42", "41")]
    score(trajectories, _function("offered", bonus=0.5), _function("everything", k=1), _function("later"))
    assert [t.reward_parts for t in trajectories] == [
        {"offered": 1.5, "everything": 1.0, "later": 2.0},
        {"offered": 0.5, "everything": 1.0, "later": 2.0},
    ]


def test_a_column_is_an_argument_by_its_own_name(answered: Answered, score: Score) -> None:
    rows = [answered("a", difficulty=3), answered("a", difficulty=3, level=2.0, answer="x"), answered("a")]
    first, second, third = score(rows, _function("column"), retries=0)
    assert (first.reward, second.reward) == (3.5, 6.5)
    assert "'rewards.py:column' needs 'difficulty'; braid provides text, response" in third.reason
    (set_by_params,) = score([answered("a", difficulty=3, level=2.0)], _function("column", level=10))
    assert set_by_params.reward == 30.5
    (misspelt,) = score([answered("a")], _function("needs"))
    assert "needs 'txt', did you mean 'text'?" in misspelt.reason


def test_a_function_of_a_group_gets_lists_and_returns_one(answered: Answered, score: Score) -> None:
    group = [answered(text, answer="42", difficulty=3) for text in ("abc", "a", "ab", "b")]
    group[2].invalidate("the environment failed")
    score(group, {**_function("shortest"), "group": True}, {"kind": "exact", "weight": 0.5})
    assert [t.reward for t in group] == [0.0, 1.0, None, 1.0]


def test_a_group_whose_function_returns_no_list_of_its_length_is_invalid(
    answered: Answered, score: Score
) -> None:
    part = {**_function("of_a_group"), "group": True}
    for what in ("few", "text", "none"):
        group = score([answered(what), answered("b")], part, retries=0)
        assert all("a number for each of the 2 trajectories" in t.reason for t in group)
    one_nan, numbers = (score([answered(what), answered("b")], part) for what in ("nan", "numbers"))
    assert (one_nan[0].reward, one_nan[1].reason) == (
        1.0,
        "reward of_a_group: returned nan, not a finite number",
    )
    assert [t.reward for t in numbers] == [0.5, 2.0]


@pytest.mark.parametrize(("what", "reward"), [("true", 1.0), ("float32", 0.5), ("tensor", 0.25)])
def test_scalars_of_any_kind_are_numbers(answered: Answered, score: Score, what: str, reward: float) -> None:
    (scored,) = score([answered("", what=what)], _function("returning"))
    assert scored.reward == reward


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("string", "returned '1.0' (str), not a number"),
        ("none", "returned None (NoneType), not a number"),
        ("list", "returned [1.0] (list), not a number"),
        ("array", "returned array([1.]) (ndarray), not a number"),
    ],
)
def test_a_score_that_is_not_a_finite_number_makes_the_trajectory_invalid(
    answered: Answered, score: Score, what: str, fault: str
) -> None:
    (scored,) = score([answered("", what=what)], {"kind": "pattern", "pattern": ""}, _function("returning"))
    assert (scored.reward, scored.status, scored.reward_parts) == (None, Status.INVALID, {})
    assert scored.reason == f"reward returning: {fault}"


@pytest.mark.parametrize("name", ["raising", "raising_later"])
def test_a_reward_that_raises_makes_its_trajectory_invalid_and_no_other(
    answered: Answered, score: Score, name: str
) -> None:
    bad, leaving, late, good = score([answered(t) for t in ("bad", "leave", "late", "good")], _function(name))
    assert bad.reason.startswith(f"reward {name}: ValueError: cannot judge this (rewards.py:")
    assert leaving.reason.startswith(f"reward {name}: SystemExit: 3 (rewards.py:")
    assert late.reason.startswith(f"reward {name}: TimeoutError: of my own (rewards.py:")
    assert good.reward == 1.0


def test_a_failed_call_is_retried_as_often_as_configured(answered: Answered, score: Score) -> None:
    (once,) = score([answered("a")], _function("second_time"), retries=0)
    assert once.reason.startswith("reward second_time: ConnectionError: not now")
    (twice,) = score([answered("b")], _function("second_time"), retries=1)
    assert (twice.reward, twice.status) == (1.0, Status.FINISHED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hanging", "hanging_later", "blocking"])
def test_a_hanging_reward_makes_the_trajectory_invalid(
    answered: Answered, build: Callable[..., Scorer], name: str
) -> None:
    scorer = build(_function(name), timeout_s=3.0, retries=0)
    hung = answered("hang")
    asyncio.run(scorer.score([hung]))
    assert (hung.reward, hung.reason) == (None, f"reward {name}: no result within reward.timeout_s=3")
    others = [answered("x") for _ in range(3)]
    asyncio.run(scorer.score(others))
    assert [t.reward for t in others] == [1.0] * 3


def test_when_too_many_calls_hang_further_ones_fail_at_once(
    answered: Answered, build: Callable[..., Scorer]
) -> None:
    scorer = build(_function("hanging"), timeout_s=0.1, retries=0, concurrency=2)
    hung = [answered("hang") for _ in range(3)]
    for calls in (hung[:2], hung[2:]):
        asyncio.run(scorer.score(calls))
    assert hung[2].reason.startswith(
        "reward hanging: 2 earlier calls are still running after reward.timeout_s=0.1"
    )


@pytest.mark.slow
def test_a_hanging_call_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    script = """
        import asyncio, sys
        from pathlib import Path
        from braid.config.reward import RewardConfig
        from braid.rewards.scorer import build_scorer
        from braid.types import Prompt, Trajectory

        parts = [{"kind": "function", "path": f"rewards.py:{sys.argv[1]}"}]
        config = RewardConfig.model_validate({"parts": parts, "timeout_s": 0.2, "retries": 0})
        scorer = build_scorer(config, base_dir=Path.cwd())
        trajectory = Trajectory(Prompt("a:0", "a", (1,), ()), 0, answer_text="hang")
        asyncio.run(scorer.score([trajectory]))
        print(trajectory.reason)
    """
    for name in ("hanging", "blocking"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), name],
            cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True,
        )  # fmt: skip
        assert done.stdout == f"reward {name}: no result within reward.timeout_s=0.2\n"


@pytest.mark.parametrize(
    ("part", "key", "fault"),
    [
        (_function("lenght"), "path", "has no 'lenght', did you mean 'length'?"),
        (_function("length", bonus=1), "params", "'rewards.py:length' has no parameter 'bonus'"),
        (_function("length", text="x"), "params", "'text' is provided by braid; use another name"),
        (_function("positional"), "path", "has positional-only parameters"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_is_a_config_problem(
    build: Callable[..., Scorer], tmp_path: Path, part: dict[str, Any], key: str, fault: str
) -> None:
    more = "\ndef positional(text, /): return 1\n"
    (tmp_path / "rewards.py").write_text(FUNCTIONS + more)
    with pytest.raises(ConfigError) as caught:
        build(part)
    assert str(caught.value).startswith(f"reward.parts[0].{key}: ")
    assert fault in str(caught.value)


def test_parts_with_the_same_name_are_refused(build: Callable[..., Scorer]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"reward.parts\[1\].name: another part is also named 'exact'",
    ):
        build({"kind": "exact"}, {"kind": "exact", "ignore_case": True})


def _from(source: str, answered: Answered) -> Trajectory:
    trajectory = answered("42", answer="42")
    trajectory.prompt = replace(trajectory.prompt, source=source)
    return trajectory


def test_a_part_scores_the_sources_that_it_names(answered: Answered, score: Score) -> None:
    trajectories = [_from(source, answered) for source in ("a", "b", "c")]
    score(
        trajectories,
        {"kind": "exact", "sources": ["a", "b"], "weight": 2.0},
        {**_function("length"), "sources": ["b"]},
    )
    assert [(t.reward, t.reward_parts) for t in trajectories] == [
        (2.0, {"exact": 1.0}),
        (4.0, {"exact": 1.0, "length": 2.0}),
        (None, {}),
    ]
    assert trajectories[2].reason == "reward: no part scores the source 'c'"


def test_a_star_stands_for_the_sources_that_no_part_names(answered: Answered, score: Score) -> None:
    trajectories = [_from(source, answered) for source in ("a", "b", "c")]
    score(trajectories, {"kind": "exact", "sources": ["a", "*"]}, {**_function("length"), "sources": ["b"]})
    assert [t.reward_parts for t in trajectories] == [{"exact": 1.0}, {"length": 2.0}, {"exact": 1.0}]


def test_scoring_reports_its_cost(answered: Answered, build: Callable[..., Scorer]) -> None:
    scorer = build(_function("second_time"), {"kind": "exact"}, retries=1)
    metrics = asyncio.run(scorer.score([answered(text, answer="y") for text in ("x", "y")]))
    assert metrics.value("reward/retries/second_time") == 2
    assert metrics.value("reward/time/second_time_s") > 0
    assert set(metrics) == {"reward/retries/second_time", "reward/time/second_time_s"}


def test_a_part_whose_model_is_not_there_is_refused(build: Callable[..., Scorer]) -> None:
    with pytest.raises(ConfigError, match=r"reward.parts\[0\]: needs a reward model"):
        build({"kind": "model", "path": "somewhere"})


@pytest.mark.parametrize("form", ["def", "async def"])
@pytest.mark.parametrize("what", [*NUMBERS, *RAISED])
def test_whatever_a_function_returns_or_raises_makes_the_trajectory_invalid_at_once(
    what: str,
    form: str,
    tmp_path: Path,
    score: Callable[..., list[Trajectory]],
    answered: Callable[..., Trajectory],
) -> None:
    code = f"""
from tests.envs.odd import NUMBERS, RAISED

{form} odd(text):
    if text in RAISED:
        raise RAISED[text]("from the user")
    return NUMBERS[text]
"""
    (tmp_path / "odd.py").write_text(code)
    part = {"kind": "function", "path": "odd.py:odd"}
    (trajectory,) = score([answered(what)], part, timeout_s=60, retries=0)
    assert trajectory.status is Status.INVALID
    assert "reward.timeout_s" not in trajectory.reason
    if what in RAISED and what != "CancelledError" and not (form == "async def" and "Stop" in what):
        assert "odd.py:6" in trajectory.reason


def test_weights_that_sum_to_one_give_a_reward_of_one(answered: Answered, score: Score) -> None:
    trajectory = answered("right", answer="right")
    parts = [{"kind": "exact", "name": str(weight), "weight": weight} for weight in (0.7, 0.2, 0.1)]
    score([trajectory], *parts)
    assert trajectory.reward == 1.0
