"""Read a config in any of the four config languages: detect the language, then build the native config and
the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from braid.config.load import Loaded, interpolate, load_config, validate
from braid.config.schema import RunConfig
from braid.config.secrets import distinct, hidden
from braid.config.source import Written, parse_path, place, read_file
from braid.errors import ConfigError, Problem
from braid.plan import derive, unused_keys, why_unused

from .compose import compose, merged
from .rlinf import RLINF
from .roll import ROLL
from .skyrl import SKYRL
from .table import Dialect, DialectName, Entry
from .translate import NATIVE, overlap, translate

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (RLINF, ROLL, SKYRL)}
Language = Literal["native", "rlinf", "roll", "skyrl"]


@dataclass(frozen=True, slots=True)
class Read:
    """A loaded config. `ledger` is empty for native configs."""

    loaded: Loaded
    language: Language
    ledger: tuple[Entry, ...] = ()


class Refused(ConfigError):
    """Error of a config of another system. `ledger` still accounts for all of its keys."""

    def __init__(self, problems: Sequence[Problem], language: DialectName, ledger: Sequence[Entry]) -> None:
        super().__init__(problems)
        self.language: DialectName = language
        self.ledger = tuple(ledger)


def read_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    dialect: Language | None = None,
    backend: str | None = None,
    engine: str | None = None,
    allowed: Sequence[str] = (),
) -> Read:
    """Load the config at `path`, in any supported config language.

    `dialect` is detected from the keys when None. Overrides use the file's language; `braid.KEY=VALUE` sets a
    native key of a foreign file. `backend` and `engine` take precedence over the config. Raises ConfigError
    with all problems; unsupported keys are problems unless `allowed` names them.
    """
    language = recognise(path) if dialect is None else dialect
    if language == "native":
        return Read(load_config(path, overrides, backend=backend, engine=engine), "native")
    translation = translate(
        read_foreign(path, overrides, DIALECTS[language]),
        DIALECTS[language],
        backend=backend,
        engine=engine,
        allowed=allowed,
    )
    if translation.written.problems:
        secrets = distinct(translation.written.secrets)
        problems = [replace(p, message=hidden(p.message, secrets)) for p in translation.written.problems]
        raise Refused(problems, language, _with_refused(translation.ledger, problems))
    try:
        loaded = validate(translation.written, path)
    except ConfigError as error:
        raise Refused(error.problems, language, _with_refused(translation.ledger, error.problems)) from None
    ledger = tuple(_with_unused(translation.ledger, loaded.config))
    kept = {"source.yaml": path.read_text("utf-8"), "ledger.json": ledger_text(ledger)}
    return Read(replace(loaded, kept=kept), language, ledger)


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
    """Mark applied rows whose native keys nothing in a training run depends on as unused."""
    unused = unused_keys(config, derive(config, None, "train"))
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
    """Read a foreign file: merge its presets, apply the overrides, and resolve interpolations, which may refer to
    keys missing from the file that have a default."""
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
    keys = set(read_file(path).tree)
    marks = {"native": frozenset(RunConfig.model_fields)} | {name: d.marks for name, d in DIALECTS.items()}
    most = max(len(keys & known) for known in marks.values())
    best = [name for name, known in marks.items() if len(keys & known) == most]
    if len(best) > 1 and "native" in best:
        return "native"
    if len(best) > 1:
        message = f"the file could be a config of {' or '.join(best)}; choose with --dialect"
        raise ConfigError([Problem("config", message, path.name)])
    return best[0]  # pyright: ignore[reportReturnType]
