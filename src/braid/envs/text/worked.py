"""Worked conversations with tools, for supervised learning: named in a config as `response_function`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .calculator import calculate
from .tools import render_answer, render_call


def calculator_chain(row: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Pieces (text, is_policy) that work out a chain of operations from left to right, one call for each, then the
    answer after the marker `A:`.

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
    """As `calculator_chain` for two tasks of five, and the bare answer for the others: a policy that has seen both ways is
    left to find out which of them it can do right."""
    if row["metadata"]["source_index"] % 5 < 2:
        return calculator_chain(row)
    return [(f"A:{row['answer']}", True)]
