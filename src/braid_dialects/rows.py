"""Notation of the tables: each row makes the rules of one key, or of several that share everything.

    to         sets native keys: to the same value, or to one converted in the light of other keys
    always     asks for what braid always does
    ignored    changes nothing in braid
    missing    asks for a feature that braid lacks; stops the run unless allowed by name

`actor.{lr,eps}` stands for two keys, as does `actor.lr actor.eps`; with `{a,b}` as its native path, each key
sets its own. values.py has the notation of values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .conversions import mapped, sets
from .table import ABSENT, Convert, Rule
from .values import Takes, choice, takes

_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def to(
    keys: str,
    native: str | Mapping[str, Any],
    values: str | Takes | Mapping[Any, Any],
    *convert: Convert,
    default: Any = ABSENT,
    note: str = "",
) -> list[Rule]:
    """Keys that set native keys, with the steps of their conversion. The last step may be a mapping of
    values, or of native keys to constants and conversions."""
    if isinstance(values, Mapping):
        values, convert = "bool" if True in values else choice(*values), (*convert, mapped(values))
    if isinstance(native, Mapping):
        native, convert = " ".join(native), (*convert, sets(*native.values()))
    paths = _paths(keys)
    natives = _paths(native) if _ALTERNATIVES.search(native) else [native] * len(paths)
    return [
        Rule(path, takes(values), "applied", note, target, convert, default)
        for path, target in zip(paths, natives, strict=True)
    ]


def always(keys: str, why: str, values: str | Takes) -> list[Rule]:
    """Keys that ask, with any value, for what braid always does."""
    return [Rule(path, takes(values), "implied", why) for path in _paths(keys)]


def ignored(keys: str, why: str, values: str | Takes = "any") -> list[Rule]:
    """Keys that change nothing in braid."""
    return [Rule(path, takes(values), "no effect", why) for path in _paths(keys)]


def missing(keys: str, instead: str, *steps: Convert, default: Any = ABSENT) -> list[Rule]:
    """Keys that ask for a feature braid lacks, except with their `default`, null, {} or [].

    Without effect where one of the `steps` says so."""
    return [Rule(path, takes("any"), "unsupported", instead, "", steps, default) for path in _paths(keys)]


def rows(*parts: list[Rule]) -> list[Rule]:
    """A part of a table."""
    return [rule for part in parts for rule in part]


def section(keys: str, into: str = "", *first_steps: Convert) -> Callable[..., list[Rule]]:
    """A part of a table whose keys are below others, and whose conversions begin with `first_steps`.

    Native paths that begin with a dot are below `into`."""

    def below(*parts: list[Rule]) -> list[Rule]:
        made = []
        for above in _paths(keys) or [""]:
            for rule in rows(*parts):
                native = " ".join(
                    into + part if part.startswith(".") else part for part in rule.native.split()
                )
                path, steps = f"{above}.{rule.path}".lstrip("."), (*first_steps, *rule.convert)
                made.append(replace(rule, path=path, native=native, convert=steps))
        return made

    return below


def _paths(text: str) -> list[str]:
    """Expand alternatives: `a.{b,c}` -> `a.b`, `a.c`."""
    out = []
    for word in text.split():
        if (match := _ALTERNATIVES.search(word)) is None:
            out.append(word)
        else:
            head, tail = word[: match.start()], word[match.end() :]
            out += [path for name in match[1].split(",") for path in _paths(head + name + tail)]
    return out
