from __future__ import annotations

import asyncio

import pytest
from examples.solutions import calculator_chain, calculator_chain_or_guess

from braid.config.rollout import ToolEnv
from braid.envs.text.build import text_env_maker


def _row(expression: str) -> dict[str, dict[str, str]]:
    return {"metadata": {"expression": expression}}


def test_a_chain_is_worked_with_one_call_for_each_operation() -> None:
    assert calculator_chain(_row("12 * 3 - 40")) == [
        ("<calc>12*3</calc>", True),
        ("<out>36</out>", False),
        ("<calc>36-40</calc>", True),
        ("<out>-4</out>", False),
        ("A:-4", True),
    ]


@pytest.mark.parametrize("expression", ["7", "12 * 34", "-3 - -5 + 10", "42 * 25 * 73"])
def test_the_replies_are_those_that_the_environment_gives(expression: str) -> None:
    env = text_env_maker(ToolEnv(kind="tools", max_turns=10))()
    *pairs, (answer, _) = calculator_chain(_row(expression))
    for (call, is_policy), (reply, is_policy_too) in zip(pairs[::2], pairs[1::2], strict=True):
        assert is_policy
        assert not is_policy_too
        assert asyncio.run(env.reply(call)).text == reply
    assert answer == f"A:{eval(expression)}"
    assert asyncio.run(env.reply(answer)).is_done


def test_two_tasks_of_five_are_worked_and_the_others_guessed_where_both_ways_are_shown() -> None:
    rows = [{"metadata": {"expression": "2 * 3", "source_index": i}, "answer": "6"} for i in range(10)]
    worked, guessed = calculator_chain(rows[0]), [("A:6", True)]
    assert [calculator_chain_or_guess(row) for row in rows] == [worked, worked, guessed, guessed, guessed] * 2
