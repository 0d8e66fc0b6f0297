"""A dialect as a table of rules: for each foreign key, the values it accepts and how it translates.

    Apply        sets a native key: to the same value, or to one converted in the light of other keys
    Implied      asks for what braid always does; gives the reason
    NoEffect     changes nothing in braid; gives the reason
    Unsupported  stops the run unless allowed by name; gives the alternative

Paths are dotted; one component may be `*`, which matches any name. Rules are independent of each other: a
conversion reads other keys through `Source`, which also knows the dialect's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from braid.errors import Problem

from .values import ANY, Takes

Disposition = Literal["applied", "unused", "implied", "no effect", "unsupported", "refused"]
DialectName = Literal["rlinf", "roll", "skyrl"]

ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "ABSENT"})()
"""Marks a missing value where null is a valid value."""


@dataclass(frozen=True, slots=True)
class Became:
    """Result of a conversion: native paths and values, or none and the reason.

    `note` replaces the rule's own note in the ledger.
    """

    native: Mapping[str, Any] = field(default_factory=dict)
    disposition: Disposition = "applied"
    note: str = ""


def no_effect(why: str) -> Became:
    """Result for a value that changes nothing in this config."""
    return Became({}, "no effect", why)


def implied(why: str) -> Became:
    """Result for a value that asks for what braid always does."""
    return Became({}, "implied", why)


def unsupported(instead: str) -> Became:
    """Result for a value that asks for a feature braid lacks."""
    return Became({}, "unsupported", instead)


Convert = Callable[[Any, "Source"], "Became | Any"]
"""(value, source) -> the native value, or a Became for several values, none, or other native paths. Raises
ValueError if the value is invalid."""


@dataclass(frozen=True, slots=True)
class Apply:
    """The key sets a native key."""

    path: str
    native: str
    """Native path; empty when `convert` returns the paths."""
    takes: Takes
    convert: Convert | None = None
    default: Any = ABSENT
    """The original system's default, applied when the key is missing. ABSENT keeps braid's own default."""
    note: str = ""
    """Note for users: a formula, a difference from other systems, or a bug of the original that braid does
    not have."""


@dataclass(frozen=True, slots=True)
class Implied:
    """The key asks, with any value, for what braid always does."""

    path: str
    takes: Takes
    why: str


@dataclass(frozen=True, slots=True)
class NoEffect:
    """The key changes nothing in braid."""

    path: str
    takes: Takes
    why: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The key is known and asks for a feature braid lacks."""

    path: str
    instead: str
    takes: Takes = ANY
    default: Any = ABSENT
    """Value that turns the feature off; it, null, {} and [] have no effect."""

    def asks_nothing(self, value: Any) -> bool:
        return value in (None, {}, []) or value == self.default


Rule = Apply | Implied | NoEffect | Unsupported
Check = Callable[["Source"], Iterator[tuple[str, str]]]
"""source -> (foreign key, error) for each violated constraint between keys."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Config language of one system.

    `marks` are top-level keys by which a file is recognised. `aliases` maps other spellings of a key to the
    one in `rules`. `base` computes native values that no single key determines (such as the engine or the
    task).
    """

    name: DialectName
    title: str
    marks: frozenset[str]
    rules: Mapping[str, Rule]
    base: Callable[[Source], Mapping[str, Any]]
    checks: tuple[Check, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def rule_of(self, path: str) -> Rule | None:
        """Return the rule of a foreign path; for names chosen by users, the rule with `*` in place of that
        name."""
        if (found := self.rules.get(path)) is not None:
            return found
        parts = path.split(".")
        patterns = (".".join([*parts[:i], "*", *parts[i + 1 :]]) for i in reversed(range(len(parts))))
        return next((self.rules[pattern] for pattern in patterns if pattern in self.rules), None)


@dataclass(frozen=True, slots=True)
class Source:
    """A foreign file with interpolations resolved, as conversions read it.

    `backend` and `engine` are set on the command line; None leaves them to the file.
    """

    dialect: Dialect
    values: Mapping[str, Any]
    """Foreign path -> value of every leaf in the file, in the table's spelling."""
    backend: str | None = None
    engine: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    """Native path -> value of the keys below `braid` in the file."""
    at: str = ""
    """The key being converted, for rules with `*`."""

    def get(self, path: str) -> Any:
        """Return the value of a foreign key: the file's, else the original system's default, else None."""
        if path in self.values:
            return self.values[path]
        rule = self.dialect.rules.get(path)
        return rule.default if isinstance(rule, Apply) and rule.default is not ABSENT else None

    def has(self, path: str) -> bool:
        """Whether the file has the key, or keys below it."""
        return path in self.values or any(name.startswith(f"{path}.") for name in self.values)

    def below(self, path: str) -> dict[str, Any]:
        """Return name -> value of the keys below a foreign path."""
        prefix = f"{path}."
        return {name.removeprefix(prefix): v for name, v in self.values.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class Entry:
    """Ledger row: how one leaf of a foreign file was translated.

    `unused`: sets native keys on which nothing in this run depends; the note is the plan's reason. `refused`:
    unknown or invalid; the note is the error.
    """

    path: str
    value: Any
    disposition: Disposition
    native: Mapping[str, Any]
    note: str
    origin: str = ""


def table(*rules: Rule) -> dict[str, Rule]:
    """Index rules by path; paths must be unique."""
    out: dict[str, Rule] = {}
    for rule in rules:
        assert rule.path not in out, f"two rules for {rule.path}"
        out[rule.path] = rule
    return out


def problems_of(source: Source) -> Iterator[Problem]:
    """Check the dialect's constraints between keys."""
    for check in source.dialect.checks:
        for key, message in check(source):
            yield Problem(key, message)
