"""Reading a config in any of the four languages: which one it is, then the native config and the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from braid.config.load import Loaded, interpolate, load_config, validate
from braid.config.schema import RunConfig
from braid.config.source import OVERRIDE, Written, read_file
from braid.errors import ConfigError, Problem
from braid.plan import derive, idle_keys

from .compose import compose
from .rlinf import RLINF
from .roll import ROLL
from .skyrl import SKYRL
from .table import Dialect, DialectName, Entry
from .translate import NATIVE, defaults_tree, translate

DIALECTS: dict[DialectName, Dialect] = {dialect.name: dialect for dialect in (RLINF, ROLL, SKYRL)}
Language = Literal["native", "rlinf", "roll", "skyrl"]


@dataclass(frozen=True, slots=True)
class Read:
    """A config that was read. `ledger` is empty for a native one."""

    loaded: Loaded
    language: Language
    ledger: tuple[Entry, ...] = ()


def read_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    dialect: Language | None = None,
    backend: str | None = None,
    engine: str | None = None,
    allowed: Sequence[str] = (),
) -> Read:
    """The config in `path`, in whatever language it is written.

    `dialect` is recognised by its keys when None. Overrides are in the file's own language; `braid.KEY=VALUE` sets a native
    key of a foreign file. `backend` and `engine` come before what the config says. Raises ConfigError with every problem;
    unsupported keys are one unless `allowed` names them.
    """
    language = recognise(path) if dialect is None else dialect
    if language == "native":
        chosen = {"train.backend": backend, "rollout.engine": engine}
        forced = [f"{key}={value}" for key, value in chosen.items() if value is not None]
        return Read(load_config(path, [*overrides, *forced]), "native")
    translation = translate(
        read_foreign(path, overrides, DIALECTS[language]),
        DIALECTS[language],
        backend=backend,
        engine=engine,
        allowed=allowed,
    )
    if translation.written.problems:
        raise ConfigError(translation.written.problems)
    loaded = validate(translation.written, path)
    ledger = tuple(_with_idle(translation.ledger, loaded.config))
    kept = {"source.yaml": path.read_text("utf-8"), "ledger.json": ledger_text(ledger)}
    return Read(replace(loaded, kept=kept), language, ledger)


def _with_idle(ledger: Sequence[Entry], config: RunConfig) -> Iterator[Entry]:
    """The ledger with the rows told apart whose native keys nothing reads in a training run."""
    idle = idle_keys(config, derive(config, None, "train"))

    def why(native: str) -> str:
        parts = native.split(".")
        above = (".".join(parts[: i + 1]) for i in range(len(parts)))
        return next((idle[key] for key in above if key in idle), "")

    for entry in ledger:
        reasons = [why(native) for native in entry.native]
        is_idle = entry.disposition == "applied" and all(reasons)
        yield replace(entry, disposition="idle", note=reasons[0]) if is_idle else entry


def ledger_text(ledger: Sequence[Entry]) -> str:
    """The ledger as JSON: a list of objects with path, value, disposition, native (path -> value) and note."""
    names = ("path", "value", "disposition", "native", "note")
    rows = [{name: getattr(entry, name) for name in names} for entry in ledger]
    return json.dumps(rows, indent=2, ensure_ascii=False, default=dict) + "\n"


def read_foreign(path: Path, overrides: Sequence[str], dialect: Dialect) -> Written:
    """A foreign file with its presets, overrides and interpolations worked in."""
    foreign = compose(path, overrides)
    foreign.tree = interpolate(foreign, lambda tree: defaults_tree(dialect, tree))
    foreign.problems = [replace(p, key=p.key or NATIVE) for p in foreign.problems]
    return foreign


def recognise(path: Path) -> Language:
    """The language of a file, by its top-level keys: the one that knows the most of them. Raises ConfigError on a draw."""
    keys = set(read_file(path).tree)
    marks = {"native": frozenset(RunConfig.model_fields)} | {name: d.marks for name, d in DIALECTS.items()}
    scores = {name: len(keys & known) for name, known in marks.items()}
    best = [name for name, score in scores.items() if score == max(scores.values())]
    if len(best) > 1 and "native" in best:
        return "native"
    if len(best) > 1:
        message = f"the file's keys fit {' and '.join(best)} alike; say which with --dialect"
        raise ConfigError([Problem("config", message, path.name)])
    return best[0]  # pyright: ignore[reportReturnType]


__all__ = ["DIALECTS", "OVERRIDE", "Language", "Read", "read_config", "read_foreign", "recognise"]
