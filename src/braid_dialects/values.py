"""Values that foreign keys accept, with a description for errors and samples for tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Takes:
    """The values that a key accepts.

    `words` completes "X is not ...". `choices` lists the values of an enumerated key in the original's
    spelling; empty for other keys. `samples` are distinct accepted values, for tests that change a key and
    expect an effect.
    """

    words: str
    accepts: Callable[[Any], bool]
    samples: tuple[Any, ...]
    choices: tuple[Any, ...] = ()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def choice(*choices: Any) -> Takes:
    """One of the listed values; compared with their types, so that true, 1 and "1" differ."""
    words = "one of " + ", ".join("null" if c is None else str(c) for c in choices)
    return Takes(words, lambda v: any(type(v) is type(c) and v == c for c in choices), choices, choices)


def nullable(takes: Takes) -> Takes:
    """Values that `takes` accepts, or null."""
    choices = (*takes.choices, None) if takes.choices else ()
    words = takes.words + (", null" if takes.choices else ", or null")
    return Takes(words, lambda v: v is None or takes.accepts(v), (*takes.samples, None), choices)


def either(first: Takes, second: Takes) -> Takes:
    """Values that either of the two accepts."""
    return Takes(
        f"{first.words}, or {second.words}",
        lambda v: first.accepts(v) or second.accepts(v),
        first.samples + second.samples,
    )


def integer(least: int | None = None, *, samples: tuple[int, ...] = ()) -> Takes:
    """An integer of at least `least`."""
    low = 0 if least is None else least
    words = "an integer" + ("" if least is None else f" >= {least}")
    return Takes(
        words, lambda v: _is_int(v) and (least is None or v >= least), samples or (low + 1, low + 2, low + 7)
    )


def number(
    least: float | None = None,
    most: float | None = None,
    *,
    above: bool = False,
    samples: tuple[float, ...] = (),
) -> Takes:
    """A finite number from `least` (exclusive with `above`) to `most`."""
    bounds = [] if least is None else [f"> {least:g}" if above else f">= {least:g}"]
    bounds += [] if most is None else [f"<= {most:g}"]
    words = "a number" + (" " + " and ".join(bounds) if bounds else "")

    def accepts(value: Any) -> bool:
        if not _is_number(value):
            return False
        is_high = least is None or (value > least if above else value >= least)
        return is_high and (most is None or value <= most)

    low = 0.0 if least is None else least
    span = 2.0 if most is None else most - low
    return Takes(words, accepts, samples or (low + span / 4, low + span / 2))


def text(*samples: str) -> Takes:
    """A non-empty string."""
    return Takes("a string", lambda v: isinstance(v, str) and v != "", samples or ("one", "two"))


def list_of(takes: Takes, *, length: int | None = None) -> Takes:
    """A list of values that `takes` accepts, with `length` entries if given."""
    words = f"a list{'' if length is None else f' of {length}'}, each {takes.words}"
    num = length or 1
    return Takes(
        words,
        lambda v: (
            isinstance(v, list)
            and (length is None or len(v) == length)
            and all(takes.accepts(item) for item in v)
        ),
        tuple([sample] * num for sample in takes.samples),
    )


def mapping_of(takes: Takes, *samples: dict[str, Any]) -> Takes:
    """A mapping from arbitrary names to values that `takes` accepts."""
    return Takes(
        f"a mapping of names to values, each {takes.words}",
        lambda v: isinstance(v, dict) and all(takes.accepts(item) for item in v.values()),
        samples or tuple({"name": sample} for sample in takes.samples),
    )


BOOL = Takes("true or false", lambda v: isinstance(v, bool), (True, False), (True, False))
COUNT = integer(1)
NATURAL = integer(0)
INT = integer()
NUMBER = number()
POSITIVE = number(0.0, above=True)
NON_NEGATIVE = number(0.0)
SHARE = number(0.0, 1.0)
TEXT = text()
PATH = text("folder/one", "folder/two")
ANY = Takes("any value", lambda _: True, ("one", "two"))

_NAMED = {
    "bool": BOOL, "count": COUNT, "natural": NATURAL, "int": INT, "number": NUMBER, "positive": POSITIVE,
    "non-negative": NON_NEGATIVE, "share": SHARE, "text": TEXT, "path": PATH, "any": ANY,
}  # fmt: skip


def takes(spec: str | Takes) -> Takes:
    """The values that a row of a table names: `count`, `count?` (or null), `[count]` (a list),
    `one|of|these`, `count or -1`."""
    if isinstance(spec, Takes):
        return spec
    if spec.endswith("?"):
        return nullable(takes(spec[:-1]))
    if spec.startswith("["):
        return list_of(takes(spec[1:-1]))
    if " or " in spec:
        first, second = spec.split(" or ")
        return either(takes(first), takes(second))
    return choice(*spec.split("|")) if "|" in spec else _NAMED.get(spec) or choice(int(spec))
