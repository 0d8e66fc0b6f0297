"""A dialect as a table of rules: for each foreign key, the values it accepts and what it becomes.

A component `*` of a key matches any name. Rules are independent of each other: a conversion reads other keys
through `Source`, which also knows the dialect's defaults. rows.py has the notation of the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Literal

from braid.config.source import is_within

from .values import Takes

Disposition = Literal["applied", "unused", "implied", "no effect", "unsupported", "refused"]
DialectName = Literal["rlinf", "roll", "skyrl", "verl", "trl"]

ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "ABSENT"})()
"""Marks a missing value where null is a valid value."""
_PLACE = re.compile(r"\{(\w+)\}")


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
"""(value, source) -> the native value, or a Became that ends the conversion. Raises ValueError if the value
is invalid."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table, for one key."""

    path: str
    takes: Takes
    disposition: Disposition
    note: str = ""
    """For users: a formula, a difference from the original; the reason or the alternative of other rows."""
    native: str = ""
    """Native paths, separated by spaces; empty when the conversion returns them. `*` is the last name of the
    key; `{engine}` and other places (see `Dialect.places`) follow from the file."""
    convert: Sequence[Convert] = ()
    """Steps of the conversion; each receives the value of the one before."""
    default: Any = ABSENT
    """The original system's default, applied when the key is missing (of `missing` rows: the value that turns
    the feature off). ABSENT keeps braid's own default."""

    def become(self, value: Any, source: Source) -> Became:
        """Convert a value that the rule accepts. Raises ValueError if the conversion rejects it."""
        if self.disposition in ("implied", "no effect"):
            return Became({}, self.disposition, self.note)
        for step in self.convert:
            value = step(value, source)
            if isinstance(value, Became):
                return value
        if self.disposition == "applied":
            return Became(dict.fromkeys(source.placed(self.native), value))
        if value in (None, {}, []) or value == self.default:
            off = no_effect("the default value, which turns the feature off")
            return implied("braid always does this") if value else off
        return unsupported(self.note)


Check = Callable[["Source"], Iterator[tuple[str, str]]]
"""source -> (foreign key, error) for each violated constraint between keys."""


def _patterns(path: str) -> Iterator[str]:
    """The path, and the path with `*` in place of each of its names."""
    yield path
    parts = path.split(".")
    for i in reversed(range(len(parts))):
        yield ".".join([*parts[:i], "*", *parts[i + 1 :]])


@dataclass(frozen=True)
class Dialect:
    """Config language of one system.

    `aliases` maps other spellings of a key to the one in `rules`. `base` computes native values that no
    single key determines. `places` computes what `{name}` stands for in native paths; all dialects have
    `engine`, the rollout engine, and `backend`, the training backend (of the role whose key is converted).
    """

    name: DialectName
    title: str
    rules: Mapping[str, Rule]
    base: Callable[[Source], Mapping[str, Any]]
    places: Mapping[str, Callable[[Source], str | Sequence[str]]]
    checks: tuple[Check, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    of_file: Callable[[Dialect, Mapping[str, Any], str | None], Dialect] = lambda dialect, _, __: dialect
    """(dialect, foreign path -> value, version if it is given) -> the dialect of a file, whose other keys may
    tell what a key means."""
    absent: Mapping[str, tuple[str, Callable[[Any], bool]]] = field(default_factory=dict)
    """Key, or section -> (a pipeline or method that braid lacks, the values that ask for it). A file of such
    a kind is refused with that name alone: its other keys have no meaning."""
    others: tuple[Dialect, ...] = ()
    """Dialects of the system's other pipelines, one of which `of_file` may choose."""
    telling: tuple[str, ...] = ()
    """Top-level keys without one of which no file is recognised as this dialect's; empty if any will do."""
    versions: tuple[str, ...] = ()
    version: str = ""
    version_from: str = ""
    """How the version of a file is known."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Beginning of keys in the table -> their beginning in the file."""

    @property
    def full_title(self) -> str:
        """The system, with its version if that matters."""
        return f"{self.title} {self.version}".rstrip()

    def in_file(self, text: str) -> str:
        """A message with keys as the file spells them."""
        for known, spelling in self.spelled.items():
            text = re.sub(rf"(?<![\w.]){re.escape(known)}", spelling, text)
        return text

    def absent_in(self, values: Mapping[str, Any]) -> tuple[str, str] | None:
        """(key in the file, name) of the pipeline or method that a file asks for and braid lacks."""
        for key, (name, asks) in self.absent.items():
            for path, value in values.items():
                if is_within(path, key) and asks(value):
                    return path, name
        return None

    def name_of(self, path: str) -> str:
        """A foreign path in the table's spelling."""
        return self.aliases.get(path, path)

    def rule_of(self, path: str) -> Rule | None:
        """The rule of a foreign path; for names chosen by users, the rule with `*` in place of that name."""
        return next((self.rules[p] for p in _patterns(self.name_of(path)) if p in self.rules), None)

    def is_section(self, path: str) -> bool:
        """Whether there are keys below a foreign path."""
        return any(pattern in self._sections for pattern in _patterns(self.name_of(path)))

    def takes_mapping(self, path: str) -> bool:
        """Whether a mapping at a foreign path is a value. A path that matches a `*` rule and also has rules
        for keys below it is a section."""
        is_named = self.name_of(path) in self.rules
        return is_named or (self.rule_of(path) is not None and not self.is_section(path))

    @cached_property
    def marks(self) -> frozenset[str]:
        """Top-level keys, by which a file is recognised."""
        tables = (self, *self.others)
        return frozenset(path.partition(".")[0] for one in tables for path in (*one.rules, *one.aliases))

    @cached_property
    def _sections(self) -> frozenset[str]:
        parts = [path.split(".") for path in (*self.rules, *self.aliases)]
        return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The original's defaults, by key in the table's spelling."""
        applied = {path: rule for path, rule in self.rules.items() if rule.disposition == "applied"}
        return {path: rule.default for path, rule in applied.items() if rule.default is not ABSENT}

    def natives(self, rule: Rule) -> list[str]:
        """The native paths of a rule in a file without keys."""
        return Source(self, {}, at=rule.path).placed(rule.native)


@dataclass(frozen=True, slots=True)
class Source:
    """A foreign file with interpolations resolved, as conversions read it.

    `backend` and `engine` are set on the command line; None leaves them to the file.
    """

    dialect: Dialect
    values: dict[str, Any]
    """Foreign path -> value of every leaf in the file, in the table's spelling."""
    backend: str | None = None
    engine: str | None = None
    braid_values: Mapping[str, Any] = field(default_factory=dict)
    """Native path -> value of the keys below `braid` in the file."""
    at: str = ""
    """The key being converted."""

    def __getitem__(self, path: str) -> Any:
        """The value of a foreign key: the file's, else the original system's default, else None. A path that
        begins with dots is relative to the key being converted: `.x` beside it, `..x` one section above."""
        if path.startswith("."):
            name = path.lstrip(".")
            path = ".".join([*self.at.split(".")[: len(name) - len(path)], name])
        return self.values.get(path, self.dialect.defaults.get(path))

    def has(self, path: str) -> bool:
        """Whether the file has the key, or keys below it."""
        return any(is_within(name, path) for name in self.values)

    def place(self, name: str) -> Any:
        """What `{name}` stands for in native paths."""
        return self.dialect.places[name](self)

    def placed(self, native: str) -> list[str]:
        """The native paths that a rule's text stands for."""
        paths = []
        for text in native.replace("*", self.name).split():
            names = _PLACE.findall(text)
            choices = [[path] if isinstance(path := self.place(name), str) else path for name in names]
            paths += [text.format(**dict(zip(names, chosen, strict=True))) for chosen in product(*choices)]
        return paths

    @property
    def rule(self) -> Rule:
        """The rule of the key being converted."""
        rule = self.dialect.rule_of(self.at)
        assert rule is not None, self.at
        return rule

    @property
    def native(self) -> list[str]:
        """The native paths of the key being converted."""
        return self.placed(self.rule.native)

    @property
    def name(self) -> str:
        """The last name of the key being converted."""
        return self.at.rpartition(".")[2]


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


def table(rules: list[Rule]) -> dict[str, Rule]:
    """Index rules by path; paths must be unique."""
    out: dict[str, Rule] = {}
    for rule in rules:
        assert rule.path not in out, f"two rules for {rule.path}"
        out[rule.path] = rule
    return out
