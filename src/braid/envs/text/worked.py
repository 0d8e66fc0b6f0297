"""Worked conversations with tools for supervised learning, for `response_function` in a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .calculator import calculate
from .tools import render_answer, render_call


def calculator_chain(row: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Evaluate a chain of operations from left to right, one tool call each, then give the answer after the
    marker `A:`.

    Returns pieces (text, is_policy).

    `row` is an entry of reasoning-gym's products or chain_sum: for 2 * 3 * 4, `<calc>2*3</calc>`, the reply
    `<out>6</out>`, `<calc>6*4</calc>`, the reply `<out>24</out>`, `A:24`.
    """
    total, *rest = row["metadata"]["expression"].split()
    pieces: list[tuple[str, bool]] = []
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        call = f"{total}{operator}{number}"
        total = calculate(call)
        pieces += [(render_call("calc", call), True), (render_answer(total), False)]
    return [*pieces, (f"A:{total}", True)]


def calculator_chain_or_guess(row: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """`calculator_chain` for two tasks in five, the bare answer for the others: the policy learns both
    styles, and has to discover which one it can do correctly."""
    if row["metadata"]["source_index"] % 5 < 2:
        return calculator_chain(row)
    return [(f"A:{row['answer']}", True)]
