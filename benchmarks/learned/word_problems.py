"""Word problems for python_tool.yaml: their answers, and conversations that solve them with code or guess.

The numbers are those of reasoning-gym's `gcd`; the text of a problem, the source's template, decides what is
asked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

CODE = {
    "pens": "print({0}*{1})",
    "seats": "print({0}*{1}-{2})",
    "bags": "import math;print(math.gcd({0},{1}))",
    "bells": "import math;print(math.lcm({0},{1}))",
}
"""What is asked for, and code that answers it."""


def _answer(asked: str, numbers: list[int]) -> str:
    printed: list[str] = []
    exec(CODE[asked].format(*numbers), {"print": lambda value: printed.append(str(value))})
    return printed[0]


def is_right(text: str, prompt: str, fields: Mapping[str, Any]) -> float:
    """1 if the last turn gives the answer after the marker `A:`."""
    asked = next(word for word in CODE if word in prompt)
    return float(text == f"A:{_answer(asked, fields['metadata']['numbers'])}")


def _solution(asked: str, row: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The code that answers the problem, for one in five; code that answers another, for one in five; else a
    guess."""
    numbers, index = row["metadata"]["numbers"], row["metadata"]["source_index"]
    rng = random.Random(index)
    answer = _answer(asked, numbers)
    if index % 5 > 1:
        guess = re.sub(r"\d", lambda _: rng.choice("0123456789"), answer)
        return [(f"A:{guess}", True)]
    done = asked if index % 5 == 1 else rng.choice([other for other in CODE if other not in (asked, "seats")])
    result = _answer(done, numbers)
    code = f"<python>{CODE[done].format(*numbers)}</python>"
    return [(code, True), (f"<out>{result}</out>", False), (f"A:{result}", True)]


pens, seats, bags, bells = (partial(_solution, asked) for asked in CODE)
