"""Solutions to the tasks of quickstart.yaml, agent.yaml and prefer.yaml, for `response_function` and
`pair_function`.

Each function takes a row of reasoning-gym's chain_sum or products. A model trained on the mixtures learns
both styles, but can carry out only one of them reliably; reinforcement learning has to discover which.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from braid.envs.agents.calculator import calculate, calculator


def chain_sum(row: Mapping[str, Any]) -> str:
    """Running totals from left to right, then the answer after the marker `A:`. For `12 + 34 - 5` it is
    `12+34=46 46-5=41 A:41`."""
    first, *rest = row["metadata"]["expression"].split()
    total, written = int(first), []
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        following = total + int(number) if operator == "+" else total - int(number)
        written.append(f"{total}{operator}{number}={following}")
        total = following
    return " ".join([*written, f"A:{total}"])


def chain_sum_or_guess(row: Mapping[str, Any]) -> str:
    """The solution of `chain_sum` for two tasks in five, a guess (`A:7`) for the others."""
    if _shows_working(row):
        return chain_sum(row)
    return f"A:{Random(row['metadata']['source_index']).randint(-10, 19)}"


def worked_or_guess(row: Mapping[str, Any]) -> tuple[str, str]:
    """A pair: the solution of `chain_sum` is preferred to a guess."""
    return chain_sum(row), f"A:{Random(row['metadata']['source_index']).randint(-10, 19)}"


def right_or_wrong(row: Mapping[str, Any]) -> tuple[str, str]:
    """A pair: the solution of `chain_sum` is preferred to the same with another answer."""
    solution, answer = chain_sum(row), int(row["answer"])
    wrong = answer + Random(row["metadata"]["source_index"]).choice([-3, -2, -1, 1, 2, 3])
    return solution, f"{solution.rpartition(':')[0]}:{wrong}"


def calc(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: The expression, for example 83*42.
    """
    return calculator(expression)


def calculator_chain(row: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """One call of the calculator per operation, from left to right, then the answer after the marker `A:`.

    Returns pieces (text, is_policy). For 2 * 3 * 4: `<calc>2*3</calc>`, the reply `<out>6</out>`,
    `<calc>6*4</calc>`, the reply `<out>24</out>`, `A:24`.
    """
    total, *rest = row["metadata"]["expression"].split()
    pieces: list[tuple[str, bool]] = []
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        call = f"{total}{operator}{number}"
        total = calculate(call)
        pieces += [(f"<calc>{call}</calc>", True), (f"<out>{total}</out>", False)]
    return [*pieces, (f"A:{total}", True)]


def calculator_chain_or_guess(row: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """`calculator_chain` for two tasks in five, the bare answer for the others."""
    return calculator_chain(row) if _shows_working(row) else [(f"A:{row['answer']}", True)]


def _shows_working(row: Mapping[str, Any]) -> bool:
    return row["metadata"]["source_index"] % 5 < 2
