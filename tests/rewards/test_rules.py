from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from braid.errors import ConfigError
from braid.generators import reasoning_gym
from braid.types import Segment, Trajectory, Turn

Answered = Callable[..., Trajectory]
Score = Callable[..., list[Trajectory]]


@pytest.mark.parametrize(
    ("text", "answer", "settings", "reward"),
    [
        ("42", "42", {}, 1.0),
        (" 42\n", "42", {}, 1.0),
        ("42", 42, {}, 1.0),
        ("is 42", "42", {}, 0.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
        ("A:1 then A: 42", "42", {"pattern": r"A:\s*(\d+)"}, 1.0),
        ("A:42 then A:1", "42", {"pattern": r"A:\s*(\d+)"}, 0.0),
        ("42", "42", {"pattern": r"A:\s*(\d+)"}, 0.0),
        ("42", ["41", 42], {}, 1.0),
        ("PARIS", ["Rome", "Paris "], {"ignore_case": True}, 1.0),
        ("42", ["41", "43"], {}, 0.0),
        ("A:", "", {"pattern": r"A:(\d+)?"}, 0.0),
        ("$1,000", "1000", {"ignore": ",$"}, 1.0),
        ("$1,000", "$ 1000", {"ignore": ",$"}, 1.0),
        ("1,000", "1000", {}, 0.0),
    ],
)
def test_exact_compares_the_answer_with_the_reference(
    answered: Answered, score: Score, text: str, answer: object, settings: dict[str, Any], reward: float
) -> None:
    (scored,) = score([answered(text, answer=answer)], {"kind": "exact", **settings})
    assert (scored.reward, scored.reward_parts) == (reward, {"exact": reward})


@pytest.mark.parametrize("kind", ["exact", "math"])
def test_a_prompt_without_a_reference_is_not_a_wrong_answer(
    answered: Answered, score: Score, kind: str
) -> None:
    (scored,) = score([answered("42")], {"kind": kind})
    assert scored.reward is None
    assert scored.reason.startswith(f"reward {kind}: the prompt has no reference answer; set answer_key")


@pytest.mark.parametrize(("text", "reward"), [("<think>a\nb</think> 4", 1.0), ("<think>a", 0.0), ("", 0.0)])
def test_pattern_looks_anywhere_and_over_lines(
    answered: Answered, score: Score, text: str, reward: float
) -> None:
    (scored,) = score([answered(text)], {"kind": "pattern", "pattern": "<think>.*</think>"})
    assert scored.reward == reward


THOUGHT = {"prefill": "<think>\n", "sampled": "A or 42? 42\n</think>\n\nB: `7`", "reasoning": "A or 42? 42"}


@pytest.mark.parametrize(
    ("part", "reward"),
    [
        ({"kind": "pattern", "pattern": r"\A<think>.*</think>"}, 1.0),
        ({"kind": "pattern", "pattern": "42"}, 1.0),
        ({"kind": "pattern", "pattern": "42", "reads": "answer"}, 0.0),
        ({"kind": "pattern", "pattern": r"\AB", "reads": "answer"}, 1.0),
        ({"kind": "exact", "pattern": "([0-9]+)"}, 0.0),
        ({"kind": "math"}, 0.0),
        ({"kind": "choice"}, 0.0),
        ({"kind": "code", "pattern": "(42)"}, 0.0),
        ({"kind": "length", "unit": "characters", "end": 60}, -len(THOUGHT["sampled"]) / 60),
        ({"kind": "repetition", "ngram": 1}, 0.0),
    ],
)
def test_formats_and_lengths_are_of_the_whole_turn_and_everything_else_of_its_answer(
    answered: Answered, score: Score, part: dict[str, Any], reward: float
) -> None:
    reference = "A" if part["kind"] == "choice" else "42"
    trajectory = answered("B: `7`", answer=reference, tests="assert True", **THOUGHT)
    (scored,) = score([trajectory], part)
    assert scored.reward == pytest.approx(reward), scored.reason


def test_repetition_counts_reasoning(answered: Answered, score: Score) -> None:
    (scored,) = score([answered("b", sampled="a a </think> b")], {"kind": "repetition", "ngram": 1})
    assert scored.reward == -0.25


def test_a_pattern_that_times_out_makes_the_trajectory_invalid(answered: Answered, score: Score) -> None:
    endless = "(?:a|aa)+$"
    (scored,) = score(
        [answered("a" * 60 + "b")], {"kind": "pattern", "pattern": endless}, timeout_s=0.1, retries=0
    )
    assert scored.reward is None
    assert scored.reason.startswith(
        "reward pattern: matching the pattern took longer than reward.timeout_s=0.1"
    )


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ({"kind": "pattern", "pattern": "("}, "invalid regular expression '(': missing )"),
        ({"kind": "exact", "pattern": r"A:\d+"}, "has no group; enclose the answer in one"),
        ({"kind": "reasoning_gym", "pattern": "x"}, "has no group"),
    ],
)
def test_an_invalid_pattern_is_a_config_problem(
    build: Callable[..., object], part: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"kind": "math"}, part)
    assert str(caught.value).startswith("reward.parts[1].pattern: ")
    assert fault in str(caught.value)


def _entry(generator: str, **params: Any) -> dict[str, Any]:
    entry = dict(reasoning_gym().create_dataset(generator, size=1, seed=0, **params)[0])
    of_scorer = {"generator": generator, "params": params, "answer": entry["answer"]}
    return {**entry, "reasoning_gym": of_scorer}


def test_the_generators_own_scorer_judges_what_the_pattern_finds(answered: Answered, score: Score) -> None:
    entry = _entry("chain_sum", max_terms=2)
    texts = [f"1+1 A:{entry['answer']}", f"A: {entry['answer']}.0", "A:-", "nothing"]
    other_reference = {**entry, "answer": "x"}  # of another answer_key
    scored = score(
        [answered(text, **other_reference) for text in texts],
        {"kind": "reasoning_gym", "pattern": r"A:\s*(.*)"},
    )
    assert [t.reward for t in scored] == [1.0, 1.0, 0.0, 0.0]


def test_a_scorer_that_evaluates_the_answer_runs_in_a_separate_process(
    answered: Answered, score: Score
) -> None:
    entry = _entry("countdown")
    killing = "__import__('os').kill(__import__('os').getpid(), 9)"
    right, attack = score(
        [answered(entry["metadata"]["expression"], **entry), answered(killing, **entry)],
        {"kind": "reasoning_gym"},
        retries=0,
    )
    assert right.reward == 1.0
    assert (
        attack.reason
        == "reward reasoning_gym: the scoring process exited without a result (out of memory, or killed)"
    )


def test_a_source_without_a_generator_has_no_scorer(answered: Answered, score: Score) -> None:
    (scored,) = score([answered("1", answer="1")], {"kind": "reasoning_gym"})
    assert scored.reason.startswith("reward reasoning_gym: source 'a' is not procedural")


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("B", "B", 1.0),
        ("(b)", "B", 0.0),  # a lone letter counts when it is a capital: "a" is a word
        ("The answer is (b).", "B. Paris", 1.0),
        ("**Answer:** B", "(B)", 1.0),
        ("Answer: A? No.\nAnswer: B", "B", 1.0),
        (r"A is wrong, so \boxed{\text{B}} as C is", "B", 1.0),
        (r"\boxed{B}, though some say the answer is C", "B", 1.0),
        ("I think it is B", "B", 1.0),
        ("I like Bananas", "B", 0.0),
        ("The answer is Belgium", "B", 0.0),
        ("Z", "A", 0.0),
        ("", "A", 0.0),
        ("C", ["B", "C"], 1.0),
        ("The answer is a prime number.", "A", 0.0),
        ("Answer: A careful reader sees that it is B.", "B", 1.0),
        ("A triangle has three sides.", "A", 0.0),
        ("It is B, I think.", "B", 1.0),
        ("It's B, I\u2019m sure.", "B", 1.0),
        ("The answer is A because of that.", "A", 1.0),
        ("The answer is a.", "A", 1.0),
        ("A is right.", "A", 1.0),
        (r"\boxed{B, C}", "B", 0.0),
        (r"\boxed{B, C}", "C", 0.0),
        (r"B, so \boxed{BC}", "B", 0.0),
        (r"\boxed{\text{(B) and (C)}}", "B", 0.0),
        (r"\boxed{B} or \boxed{C}", "C", 0.0),
        (r"\fbox{b}", "B", 1.0),
        (r"\boxed{B. Paris, a city}", "B", 1.0),
        ("The answer is B or C.", "B", 0.0),
        ("The answers are B and C because", "C", 0.0),
        ("The answer is B, C is wrong", "B", 1.0),
        ("<think>It is B", "B", 0.0),
        ("<think>B? C? The answer is B.</think>\nC", "C", 1.0),
        ("<answer>b</answer> rather than C", "B", 1.0),
    ],
)
def test_choice_compares_letters(
    answered: Answered, score: Score, text: str, answer: object, reward: float
) -> None:
    (scored,) = score([answered(text, answer=answer)], {"kind": "choice"})
    assert (scored.reason, scored.reward) == ("", reward)


@pytest.mark.parametrize(
    ("text", "reward"),
    [(r"\boxed{B}", 1.0), ("The answer is B", 0.5), (r"\boxed{C}", -0.5), ("C", -1.0), ("none", -1.0)],
)
def test_a_choice_may_have_custom_scores(answered: Answered, score: Score, text: str, reward: float) -> None:
    (scored,) = score([answered(text, answer="B")], {"kind": "choice", "scores": [1.0, 0.5, -0.5, -1.0]})
    assert scored.reward == reward


@pytest.mark.parametrize(
    ("text", "ngram", "reward"),
    [
        ("", 3, 0.0),
        ("one two", 3, 0.0),
        ("one two three", 3, 0.0),
        ("a b A B a b", 2, -0.6),
        ("no no no no", 1, -0.75),
    ],
)
def test_repetition_is_the_fraction_of_ngrams_that_occurred_before(
    answered: Answered, score: Score, text: str, ngram: int, reward: float
) -> None:
    (scored,) = score([answered(text)], {"kind": "repetition", "ngram": ngram})
    assert scored.reward == pytest.approx(reward, abs=1e-12)  # one rounding of a quotient


def test_a_reference_that_is_not_a_letter_is_not_a_wrong_choice(answered: Answered, score: Score) -> None:
    (scored,) = score([answered("B", answer="Paris")], {"kind": "choice", "letters": "ABCD"})
    assert (
        scored.reason
        == "reward choice: the reference answer 'Paris' does not start with one of the choice letters"
    )


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1.0), (99, -1.0)])
@pytest.mark.parametrize("unit", ["tokens", "characters"])
def test_length_falls_from_start_to_end(
    answered: Answered, score: Score, unit: str, length: int, penalty: float
) -> None:
    trajectory = answered("x" * (length if unit == "characters" else 3))
    if unit == "tokens":
        trajectory.segments = [Segment([Turn([1], [2] * length, [-1.0] * length, "stop", 0)])]
    score([trajectory], {"kind": "length", "unit": unit, "start": 10, "end": 20})
    assert trajectory.reward == penalty


def test_a_length_must_end_after_it_starts(build: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="start=20 is not below end=20"):
        build({"kind": "length", "start": 20, "end": 20})
