"""A dialect as data: for each foreign key what it accepts and what becomes of it.

    Apply        becomes a native value: the same, or converted with a look at other keys
    Implied      is how braid always works, and why
    NoEffect     changes nothing here, and why
    Unsupported  stops the run unless allowed by name, and what to use instead

A path is written with dots; one part `*` stands for any name there. Rules say nothing of each other: what a conversion
needs to know of other keys it asks the `Source`, which knows the dialect's defaults too.
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
"""Stands for a value that is not there, where null is a value."""


@dataclass(frozen=True, slots=True)
class Became:
    """What a conversion made of a value: native paths and values, or nothing and why.

    `note` is told beside the row in place of the rule's own.
    """

    native: Mapping[str, Any] = field(default_factory=dict)
    disposition: Disposition = "applied"
    note: str = ""


def no_effect(why: str) -> Became:
    """The value changes nothing in this config."""
    return Became({}, "no effect", why)


def implied(why: str) -> Became:
    """The value asks for what braid always does."""
    return Became({}, "implied", why)


def unsupported(instead: str) -> Became:
    """The value asks for what braid does not have."""
    return Became({}, "unsupported", instead)


Convert = Callable[[Any, "Source"], "Became | Any"]
"""(value, source) -> the native value, or a Became when it is several, none, or somewhere else. Raises ValueError with
what is wrong with the value."""


@dataclass(frozen=True, slots=True)
class Apply:
    """The key sets a native one."""

    path: str
    native: str
    """Native path; empty when `convert` names the paths itself."""
    takes: Takes
    convert: Convert | None = None
    default: Any = ABSENT
    """What the original system takes when the key is absent; set natively too. ABSENT leaves it to braid."""
    note: str = ""
    """What to know: a formula, a difference to other systems, a defect of the original that braid does not have."""


@dataclass(frozen=True, slots=True)
class Implied:
    """The key asks for what braid always does, whatever its value."""

    path: str
    takes: Takes
    why: str


@dataclass(frozen=True, slots=True)
class NoEffect:
    """The key changes nothing here."""

    path: str
    takes: Takes
    why: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The key is known and asks for what braid does not have."""

    path: str
    instead: str
    takes: Takes = ANY
    default: Any = ABSENT
    """The value with which the original does without; it, null, {} and [] have no effect."""

    def asks_nothing(self, value: Any) -> bool:
        return value in (None, {}, []) or value == self.default


Rule = Apply | Implied | NoEffect | Unsupported
Check = Callable[["Source"], Iterator[tuple[str, str]]]
"""source -> (foreign key, what is wrong) of rules that several keys have to keep together."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One system's config language.

    `marks` are top-level keys by which a file is recognised. `aliases` maps other spellings of a key to the one in `rules`.
    `base` computes native values that no single key gives (an engine, a task) from the whole file.
    """

    name: DialectName
    title: str
    marks: frozenset[str]
    rules: Mapping[str, Rule]
    base: Callable[[Source], Mapping[str, Any]]
    checks: tuple[Check, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def rule_of(self, path: str) -> Rule | None:
        """The rule of a foreign path; that with `*` in place of one of its parts for names that users choose."""
        if (found := self.rules.get(path)) is not None:
            return found
        parts = path.split(".")
        patterns = (".".join([*parts[:i], "*", *parts[i + 1 :]]) for i in reversed(range(len(parts))))
        return next((self.rules[pattern] for pattern in patterns if pattern in self.rules), None)


@dataclass(frozen=True, slots=True)
class Source:
    """A foreign file whose interpolations are resolved, as conversions see it.

    `backend` and `engine` are those of the command line, None when the file decides.
    """

    dialect: Dialect
    values: Mapping[str, Any]
    """Foreign path -> value, of every leaf in the file, under the spelling that the table uses."""
    backend: str | None = None
    engine: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    """Native path -> value, of what the file sets below `braid`."""
    at: str = ""
    """The key that is being converted, for rules with `*`."""

    def get(self, path: str) -> Any:
        """The value of a foreign key: the file's, or the original system's default, or None."""
        if path in self.values:
            return self.values[path]
        rule = self.dialect.rules.get(path)
        return rule.default if isinstance(rule, Apply) and rule.default is not ABSENT else None

    def has(self, path: str) -> bool:
        """Whether the file has the key, or keys below it."""
        return path in self.values or any(name.startswith(f"{path}.") for name in self.values)

    def below(self, path: str) -> dict[str, Any]:
        """Name -> value of the keys right below a foreign path."""
        prefix = f"{path}."
        return {name.removeprefix(prefix): v for name, v in self.values.items() if name.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the ledger: what became of one leaf of a foreign file.

    `unused`: it sets native keys on which nothing in this run depends, with the plan's reason as the note. `refused`: it is unknown
    or wrong; the note is the error.
    """

    path: str
    value: Any
    disposition: Disposition
    native: Mapping[str, Any]
    note: str
    origin: str = ""


def table(*rules: Rule) -> dict[str, Rule]:
    """The rules by path; each path once."""
    out: dict[str, Rule] = {}
    for rule in rules:
        assert rule.path not in out, f"two rules for {rule.path}"
        out[rule.path] = rule
    return out


def problems_of(source: Source) -> Iterator[Problem]:
    """What the dialect's cross-key rules have against a file."""
    for check in source.dialect.checks:
        for key, message in check(source):
            yield Problem(key, message)
