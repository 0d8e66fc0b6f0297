from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from examples.solutions import calculator_chain, calculator_chain_or_guess

from braid.envs.agents.toolboxes import ToolEnvs
from braid.envs.kinds import ToolsEnv
from braid.models.chat import ChatFormat
from braid.models.tokenizer import character_tokenizer
from braid.types import Prompt

EXAMPLES = Path(__file__).parents[2] / "examples"


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
    env = ToolEnvs(ToolsEnv(kind="tools", tools=("solutions.py:calc",)), EXAMPLES)()
    chat = ChatFormat(character_tokenizer(" 0123456789+-*<>().:/Aacltou"), end_token_ids=[1])
    *pairs, (answer, _) = calculator_chain(_row(expression))

    async def talk() -> None:
        tools = (await env.start(Prompt("t:0", "t", (), ()), 0)).tools

        def encoded(text: str) -> list[int]:
            return chat.tokenizer.encode(text, add_special_tokens=False)

        for (call, is_policy), (reply, is_policy_too) in zip(pairs[::2], pairs[1::2], strict=True):
            assert is_policy
            assert not is_policy_too
            step = await env.step(chat.parse(encoded(call), tools))
            assert chat.delta(step.messages, tools, encoded(call)) == encoded(reply)
        assert answer == f"A:{eval(expression)}"
        assert (await env.step(chat.parse(encoded(answer), tools))).is_done

    asyncio.run(talk())


def test_two_tasks_of_five_are_worked_and_the_others_guessed_where_both_ways_are_shown() -> None:
    rows = [{"metadata": {"expression": "2 * 3", "source_index": i}, "answer": "6"} for i in range(10)]
    worked, guessed = calculator_chain(rows[0]), [("A:6", True)]
    assert [calculator_chain_or_guess(row) for row in rows] == [worked, worked, guessed, guessed, guessed] * 2
