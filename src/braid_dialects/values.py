"""The values that a foreign key accepts, written in short, with their description for errors.

bool  text  path  any         number > 0 and <= 1   integer >= 2   and the names in _NAMED
a|b|c   one of these          x or -1   either of two
[x]     a list                {x}       a mapping of names                  x?   or null
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Takes:
    """The values that a key accepts. `words` completes "X is not ..."; `choices` lists the values of an
    enumerated key in the original's spelling."""

    words: str
    accepts: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()


_PLAIN = {
    "bool": Takes("true or false", lambda v: isinstance(v, bool), (True, False)),
    **dict.fromkeys(("text", "path"), Takes("a string", lambda v: isinstance(v, str) and v != "")),
    "list": Takes("a list", lambda v: isinstance(v, list)),
    "any": Takes("any value", lambda _: True),
}
_NAMED = {
    "int": "integer",
    "count": "integer >= 1",
    "natural": "integer >= 0",
    "cadence": "integer >= -1",
    "positive": "number > 0",
    "non-negative": "number >= 0",
    "share": "number >= 0 and <= 1",
    "fraction": "number > 0 and <= 1",
}
MAX_INTEGER = 2**63 - 1
"""Limit of the absolute value of integers."""
_BOUND = re.compile(r"(>=|>|<=) (-?[0-9.]+)")
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le}


def takes(spec: str | Takes) -> Takes:
    """Parse a description of values."""
    if isinstance(spec, Takes):
        return spec
    spec = _NAMED.get(spec, spec)
    if spec in _PLAIN:
        return _PLAIN[spec]
    if spec.endswith("?"):
        return nullable(spec[:-1])
    if spec.startswith("["):
        return list_of(spec[1:-1])
    if spec.startswith("{"):
        each = takes(spec[1:-1])
        words = f"a mapping of names to values, each {each.words}"
        return Takes(words, lambda v: isinstance(v, dict) and all(map(each.accepts, v.values())))
    if " or " in spec:
        first, second = map(takes, spec.split(" or "))
        return Takes(f"{first.words}, or {second.words}", lambda v: first.accepts(v) or second.accepts(v))
    if spec.startswith(("integer", "number")):
        return _numbers(spec)
    if "|" in spec:
        return choice(*spec.split("|"))
    number = int(spec)
    return Takes(f"one of {spec}", lambda v: type(v) in (int, float) and v == number)


def choice(*choices: Any) -> Takes:
    """One of the listed values; compared with their types, so that true, 1 and "1" differ."""
    shown = ("null" if c is None else str(c).lower() if isinstance(c, bool) else str(c) for c in choices)
    words = f"one of {', '.join(shown)}"
    return Takes(words, lambda v: any(type(v) is type(c) and v == c for c in choices), choices)


def nullable(spec: str | Takes) -> Takes:
    """The described values, or null."""
    base = takes(spec)
    choices = (*base.choices, None) if base.choices else ()
    words = base.words + (", null" if choices else ", or null")
    return Takes(words, lambda v: v is None or base.accepts(v), choices)


def list_of(spec: str, length: int | None = None) -> Takes:
    """A list of the described values, of a fixed length if given."""
    each = takes(spec)

    def accepts(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(each.accepts, value))

    return Takes(f"a list{'' if length is None else f' of {length}'}, each {each.words}", accepts)


def _numbers(spec: str) -> Takes:
    types = (int,) if spec.startswith("integer") else (int, float)
    bounds = [(_COMPARE[sign], float(limit)) for sign, limit in _BOUND.findall(spec)]

    def accepts(value: Any) -> bool:
        is_number = type(value) in types and (
            abs(value) <= MAX_INTEGER if isinstance(value, int) else math.isfinite(value)
        )
        return is_number and all(compare(value, limit) for compare, limit in bounds)

    return Takes(f"{'an' if spec.startswith('i') else 'a'} {spec}", accepts)
