"""Read a config in any of the config languages: detect the language, then build the native config and
the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from braid.config.explain import show_value
from braid.config.load import Loaded, in_keys_of_file, interpolate, load_config, validate
from braid.config.schema import RunConfig
from braid.config.secrets import distinct, hidden
from braid.config.source import Written, parse_path, place, read_file, text_of
from braid.errors import ConfigError, Problem
from braid.plan import default_verb, derive, unused_keys, why_unused

from .compose import compose, merged
from .rlinf import RLINF
from .roll import ROLL
from .skyrl import SKYRL
from .table import Dialect, DialectName, Entry
from .translate import NATIVE, Translation, overlap, translate
from .trl import TRL
from .verl import VERL

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (RLINF, ROLL, SKYRL, VERL, TRL)}
Language = Literal["native", "rlinf", "roll", "skyrl", "verl", "trl"]


@dataclass(frozen=True, slots=True)
class Read:
    """A loaded config. `ledger` is empty for native configs."""

    loaded: Loaded
    language: Language
    ledger: tuple[Entry, ...] = ()
    title: str = ""
    version_from: str = ""
    """The system with its version, and how that is known; empty where there is no version."""


class Refused(ConfigError):
    """Error of a config of another system. `ledger` still accounts for all of its keys."""

    def __init__(self, problems: Sequence[Problem], dialect: Dialect, ledger: Sequence[Entry]) -> None:
        super().__init__(problems)
        self.language: DialectName = dialect.name
        self.ledger = tuple(ledger)
        self.title, self.version_from = dialect.full_title, dialect.version_from


def read_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    dialect: str | None = None,
    backend: str | None = None,
    engine: str | None = None,
    allowed: Sequence[str] = (),
) -> Read:
    """Load the config at `path`, in any supported config language.

    `dialect` is detected from the keys when None; `skyrl@0.4` also sets the version of the original.
    Overrides use the file's language; `braid.KEY=VALUE` sets a native key of a foreign file. `backend` and
    `engine` take precedence over the config. Raises ConfigError with all problems; unsupported keys are
    problems unless `allowed` names them.
    """
    language, version = (recognise(path), None) if dialect is None else language_and_version(dialect)
    if language == "native":
        return Read(load_config(path, overrides, backend=backend, engine=engine), "native")
    translation = translate(
        read_foreign(path, overrides, DIALECTS[language]),
        DIALECTS[language],
        backend=backend,
        engine=engine,
        allowed=allowed,
        version=version,
    )
    if translation.written.problems:
        secrets = distinct(translation.written.secrets)
        problems = [replace(p, message=hidden(p.message, secrets)) for p in translation.written.problems]
        raise Refused(problems, translation.dialect, _with_refused(translation.ledger, problems))
    foreign_keys = {native: entry.path for entry in reversed(translation.ledger) for native in entry.native}
    try:
        loaded = validate(translation.written, path)
    except ConfigError as error:
        ledger = _with_refused(translation.ledger, error.problems)
        ignored = [_of_ignored(problem, translation) for problem in error.problems]
        problems = [in_keys_of_file(problem, foreign_keys) for problem in ignored]
        raise Refused(problems, translation.dialect, ledger) from None
    ledger = tuple(_with_unused(translation.ledger, loaded.config))
    kept = {f"source{path.suffix or '.yaml'}": path.read_text("utf-8"), "ledger.json": ledger_text(ledger)}
    of_file = translation.dialect
    return Read(
        replace(loaded, kept=kept, foreign_keys=foreign_keys),
        language,
        ledger,
        of_file.full_title,
        of_file.version_from,
    )


def language_and_version(name: str) -> tuple[Language, str | None]:
    """Parse `skyrl@0.4`, or a language alone. Raises ConfigError if there is no such language or version."""
    language, at, version = name.partition("@")
    known = ("native", *DIALECTS)
    versions = DIALECTS[language].versions if language in DIALECTS else ()
    if language not in known or (at and version not in versions):
        named = [f"{one}@{version}" for one in DIALECTS for version in DIALECTS[one].versions]
        message = f"{name!r} is not one of {', '.join((*known, *named))}"
        raise ConfigError([Problem("--dialect", message, "command line")])
    return language, version or None  # pyright: ignore[reportReturnType]


def _of_ignored(problem: Problem, translation: Translation) -> Problem:
    """A problem of what an ignored key would have set, as a problem of that key."""
    dialect = translation.dialect
    for entry in translation.ledger:
        rule = dialect.rule_of(entry.path) if entry.disposition == "unsupported" else None
        if rule is not None and any(overlap(native, problem.key) for native in dialect.natives(rule)):
            why = f"{show_value(entry.value)} cannot be ignored: {entry.note}, or set {NATIVE}.{problem.key}"
            return Problem(entry.path, why, entry.origin)
    return problem


def _with_refused(ledger: Sequence[Entry], problems: Sequence[Problem]) -> tuple[Entry, ...]:
    """Mark the ledger rows that problems name, by their key or a native one, as refused."""

    def marked(entry: Entry) -> Entry:
        if entry.disposition in ("refused", "unsupported"):
            return entry
        for problem in problems:
            if problem.key == entry.path or any(overlap(key, problem.key) for key in entry.native):
                return replace(entry, disposition="refused", native={}, note=problem.message)
        return entry

    return tuple(marked(entry) for entry in ledger)


def _with_unused(ledger: Sequence[Entry], config: RunConfig) -> Iterator[Entry]:
    """Mark applied rows whose native keys nothing in the run depends on as unused."""
    unused = unused_keys(config, derive(config, None, default_verb(config)))
    for entry in ledger:
        if entry.disposition != "applied" or not entry.native:
            yield entry
        elif all(reasons := [why_unused(unused, native) for native in entry.native]):
            yield replace(entry, disposition="unused", note=reasons[0])
        else:
            yield entry


def ledger_text(ledger: Sequence[Entry]) -> str:
    """Serialise the ledger as JSON: a list of objects with path, value, disposition, native (path -> value)
    and note."""
    names = ("path", "value", "disposition", "native", "note")
    rows = [{name: getattr(entry, name) for name in names} for entry in ledger]
    return json.dumps(rows, indent=2, ensure_ascii=False, default=dict) + "\n"


def read_foreign(path: Path, overrides: Sequence[str], dialect: Dialect) -> Written:
    """Read a foreign file: merge its presets, apply the overrides, and resolve interpolations, which may
    refer to keys missing from the file that have a default."""
    foreign = compose(path, overrides)
    defaults: dict[str, Any] = {}
    for key, value in dialect.defaults.items():
        place(defaults, parse_path(key), value)
    foreign.tree = interpolate(foreign, lambda tree: merged(defaults, tree))
    foreign.problems = [replace(p, key=p.key or NATIVE) for p in foreign.problems]
    return foreign


def recognise(path: Path) -> Language:
    """Detect the language of a file: the one that knows most of its top-level keys. Raises ConfigError on a
    tie."""
    if path.suffix == ".py":
        return "trl"
    if path.suffix == ".sh":
        return "verl" if f"{VERL.telling[0]}." in text_of(path) else "skyrl"  # RLinf and ROLL launch files
    keys = set(read_file(path).tree)
    marks = {"native": frozenset(RunConfig.model_fields)} | {
        name: d.marks for name, d in DIALECTS.items() if not d.telling or keys.intersection(d.telling)
    }
    most = max(len(keys & known) for known in marks.values())
    best = [name for name, known in marks.items() if len(keys & known) == most]
    if len(best) > 1 and "native" in best:
        return "native"
    if len(best) > 1:
        message = f"the file could be a config of {' or '.join(best)}; choose with --dialect"
        raise ConfigError([Problem("config", message, path.name)])
    return best[0]  # pyright: ignore[reportReturnType]
