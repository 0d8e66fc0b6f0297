"""Replies of judges, tests columns and patterns that are odd: an error that says so, never a score."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from braid.errors import ConfigError, RewardError
from braid.rewards.judge import score_reader
from braid.rewards.kinds import JudgeReward
from braid.rewards.programs import read_tests
from braid.rewards.rules import compile_pattern

JUDGE = {"kind": "judge", "url": "http://127.0.0.1:1", "model": "m", "prompt": "{response}"}


@pytest.mark.parametrize("reply", ["nan", "inf", "-Infinity", "1e999", "9" * 400])
def test_a_judges_score_that_is_not_finite_is_an_error(reply: str) -> None:
    """With a range, infinity was the best score."""
    config = TypeAdapter(JudgeReward).validate_python({**JUDGE, "range": [0, 1], "pattern": r"(\S+)"})
    with pytest.raises(RewardError, match="finite"):
        score_reader(config, 1.0, key="reward.parts[0]")(reply)


@pytest.mark.parametrize(
    "tests",
    [{"inputs": 1, "outputs": 2}, '{"inputs": 1, "outputs": 2}', {"inputs": "ab", "outputs": "cd"}, "[" * 100_000, 3, [], " "],
)  # fmt: skip
def test_tests_of_another_form_are_refused(tests: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_tests(tests)


@pytest.mark.parametrize(
    "pattern", ["(" * 5000, "(" * 5000 + ")" * 5000, "a{99999999999999999999}", "[" * 5000, "*"]
)
def test_a_pattern_that_cannot_be_compiled_is_a_config_error(pattern: str) -> None:
    with pytest.raises(ConfigError, match="invalid regular expression"):
        compile_pattern(pattern, key="reward.parts[0].pattern")
