from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.leftovers import LIMIT_S

from braid.config.reward import RewardConfig
from braid.processes import Child
from braid.rewards.scorer import Scorer, build_scorer
from braid.types import Trajectory

Answered = Callable[..., Trajectory]
Score = Callable[..., list[Trajectory]]

EQUAL = [
    ("1/2", "0.5"),
    ("1/2", r"so it is \boxed{\frac{1}{2}}"),
    ("0.5", r"$\frac12$"),
    (r"\frac{1}{2}", "The answer is 1/2."),
    ("1,234", "1234"),
    ("50%", "0.5"),
    ("x+1", "$1+x$"),
    ("x^2-1", r"\boxed{(x-1)(x+1)}"),
    (r"$\sqrt{8}$", r"$2\sqrt{2}$"),
    ("(1,2)", "$(1, 2)$"),
    ("-3", "first 3, then \\boxed{-3}"),
    ("7 times 8 is 56.\n#### 56", r"\boxed{56}"),
    ("5", "$x = 5$"),
]
NOTATIONS = {
    r"\$18.90": "18.90",
    r"\$36": "36",
    r"\$32,\!348": "32348",
    r"32\,348": "32348",
    r"\text{\$}18.90": "18.90",
    "€5": "5",
    r"\varnothing": r"\emptyset",
    r"\lbrace 1,2\rbrace": r"\{1,2\}",
    r"\Bbb{R}": r"\mathbb{R}",
    "∞": r"\infty",
}
DIFFERENT = [("1/2", "0.51"), ("5", ""), ("5", "no idea"), ("12", r"\boxed{13}"), ("x+1", "$x-1$")]


@pytest.fixture(scope="module")
def score() -> Iterator[Score]:
    """Scores with one scorer of each config, so that its process starts once."""
    scorers = dict[str, Scorer]()

    def score(trajectories: list[Trajectory], *parts: dict[str, Any], **settings: Any) -> list[Trajectory]:
        config = {"parts": parts, **settings}
        if (key := json.dumps(config)) not in scorers:
            scorers[key] = build_scorer(RewardConfig.model_validate(config), base_dir=Path())
        asyncio.run(scorers[key].score(trajectories))
        return trajectories

    yield score
    for scorer in scorers.values():
        scorer.close()


def test_equivalent_answers_count_in_any_notation(answered: Answered, score: Score) -> None:
    scored = score([answered(text, answer=answer) for answer, text in EQUAL], {"kind": "math"})
    assert {t.answer_text: t.reward for t in scored} == {text: 1.0 for _, text in EQUAL}


def test_notations_of_the_same_value_are_equal(answered: Answered, score: Score) -> None:
    both_ways = [*NOTATIONS.items(), *((value, notation) for notation, value in NOTATIONS.items())]
    scored = score(
        [answered(rf"\boxed{{{text}}}", answer=answer) for answer, text in both_ways], {"kind": "math"}
    )
    assert [(t.answer_text, t.reason) for t in scored if t.reward != 1.0] == []


@pytest.mark.parametrize(("kind", "right", "wrong"), [("math", "5", "4"), ("choice", "B", "A")])
def test_reasoning_is_cut_once(answered: Answered, score: Score, kind: str, right: str, wrong: str) -> None:
    """Where the model's format has found it, a model's marker in the answer is one that the answer speaks of;
    tags that a prompt asks for are cut as well."""
    marker, tags = f"[THINK] is a marker. Answer: {right}", f"<reasoning>{wrong}</reasoning> Answer: {right}"
    scored = score([answered(text, reasoning="Hm.", answer=right) for text in (marker, tags)], {"kind": kind})
    assert [trajectory.reward for trajectory in scored] == [1.0, 1.0]
    (unparsed,) = score([answered(marker, answer=right)], {"kind": kind})
    assert unparsed.reward == 0.0


ORDER = {
    "<think>5, \\boxed{5}": 0.0,
    "<think>\\boxed{5}</think>": 0.0,
    "<think>\\boxed{4}</think>\nIt is 5.": 1.0,
    "4\n#### 4</think>It is $5$.": 1.0,
    "<reasoning>#### 5</reasoning><answer>4</answer>": 0.0,
    "[THINK]5[/THINK]4": 0.0,
    "<think>a</think> It is 5 <think>or 6": 0.0,
    "<answer>5</answer> and not \\boxed{4}": 1.0,
    "<answer>4</answer> <answer>2 + 3</answer> 4": 1.0,
    "<answer>so \\boxed{5}, 4": 1.0,
    "<answer>5 dollars</answer>": 1.0,
    "<answer>the total is 5</answer>": 1.0,
    "<answer>x+5</answer>": 0.0,
    "<answer></answer> 5": 0.0,
    "\\boxed{5}\n#### 4\n4": 1.0,
    "#### 4\n\\boxed{5}": 1.0,
    "\\boxed{4} \\boxed{5} and 4": 1.0,
    "\\boxed{4} and \\boxed{5}": 0.0,
    "\\boxed{4} then \\boxed{5": 0.0,
    "\\boxed {5} 4": 1.0,
    "\\fbox{5} 4": 1.0,
    "the final answer is 4: \\boxed{5}": 1.0,
    "#### 5\n4": 1.0,
    "#### 2. Sum\n2 + 3 is 5": 1.0,
    "3 and then 5": 1.0,
}


BOXES = {r"$\boxed{1}$ and $\boxed{2}$": 1.0, r"\boxed{1}, \boxed{2}": 1.0, r"\boxed{1}. \boxed{2}": 0.0}


def test_where_the_answer_is_sought(answered: Answered, score: Score) -> None:
    numbers = [answered(text, answer="5") for text in ORDER]
    sets = [answered(text, answer=r"\{1, 2\}") for text in BOXES]
    scored = score(numbers + sets, {"kind": "math"})
    assert {t.answer_text: t.reward for t in scored} == ORDER | BOXES


def test_a_pattern_finds_the_answer_after_the_reasoning(answered: Answered, score: Score) -> None:
    texts = {
        "<think>Answer: 4</think>Answer: x + 1\n4": 1.0,
        "Answer: 1+x": 1.0,
        "<think>Answer: x+1": 0.0,
        "<think>Answer: x+1</think> x+1": 0.0,
        "Answer: x+2\nx+1": 0.0,
    }
    scored = score(
        [answered(text, answer="x+1") for text in texts], {"kind": "math", "pattern": r"Answer:\s*(.*)"}
    )
    assert {t.answer_text: t.reward for t in scored} == texts


def test_different_answers_are_wrong(answered: Answered, score: Score) -> None:
    scored = score([answered(text, answer=answer) for answer, text in DIFFERENT], {"kind": "math"})
    assert [t.reward for t in scored] == [0.0] * len(DIFFERENT)


def test_any_of_several_references_is_right(answered: Answered, score: Score) -> None:
    answers = {r"\boxed{2}": 1.0, "-2": 1.0, "3": 0.0}
    scored = score([answered(text, answer=["2", "-2.0"]) for text in answers], {"kind": "math"})
    assert {t.answer_text: t.reward for t in scored} == answers


def test_a_reference_that_is_not_mathematical_is_not_a_wrong_answer(answered: Answered, score: Score) -> None:
    (scored,) = score([answered("5", answer="####")], {"kind": "math"})
    assert (
        scored.reason
        == "reward math: ValueError: the reference answer '####' is not a mathematical expression"
    )


@pytest.mark.slow
@pytest.mark.parametrize("text", ["9^9^9^9", r"\boxed{10^{10^{10^{10}}}}"])
def test_an_answer_that_keeps_sympy_busy_is_invalid_and_delays_no_other(
    answered: Answered, score: Score, text: str
) -> None:
    busy, *others = [answered(text, answer="5"), *(answered("5", answer="5") for _ in range(8))]
    score([busy, *others], {"kind": "math"}, timeout_s=5.0, retries=0)
    assert busy.reward is None
    assert busy.reason.startswith("reward math: ")
    assert [t.reward for t in others] == [1.0] * 8


def test_a_scoring_process_exits_by_itself_soon_after_its_deadline() -> None:
    child = Child("braid.rewards.isolated")
    child.channel.send(b"math")
    assert json.loads(child.channel.receive(time.monotonic() + LIMIT_S)) == [None, None]
    child.channel.send(pickle.dumps((0.2, ("9^9^9^9", "5"))))
    with pytest.raises(EOFError):
        child.channel.receive(time.monotonic() + LIMIT_S)
    assert child.end(LIMIT_S) == "was killed by SIGALRM (Alarm clock)"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7 * 8 = 56\n#### 56", 1.0),
        ("#### 56\nas 3 + 4 is not asked", 1.0),
        ("first #### 57\nthen\n####$56.", 1.0),
        ("It is 56.\n#### 57", 0.0),
        ("#### 1. Idea\nMultiply.\n#### 2. Result\n\\boxed{56}", 1.0),
    ],
)
def test_the_last_number_marked_as_in_gsm8k_counts(
    answered: Answered, score: Score, text: str, reward: float
) -> None:
    (scored,) = score([answered(text, answer="so 7 * 8 = 56\n#### 56")], {"kind": "math"})
    assert scored.reward == reward


@pytest.mark.parametrize(("answer", "reward"), [("-56.5", 1.0), ("1,234", 0.0)])
def test_marked_numbers_keep_their_sign_and_fraction(
    answered: Answered, score: Score, answer: str, reward: float
) -> None:
    (scored,) = score([answered("it is 7\n#### -56.5", answer=answer)], {"kind": "math"})
    assert scored.reward == reward
