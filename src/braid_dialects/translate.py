"""Translation of a foreign config tree to a native one, with a ledger that accounts for every leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from braid.config.explain import MAX_HINTS, show_value
from braid.config.load import leaves as config_leaves
from braid.config.secrets import Reference, distinct, hidden
from braid.config.source import Written, child, parse_path, path_text, place
from braid.errors import Problem, suggest

from .table import ABSENT, Became, Dialect, Entry, Source

NATIVE = "braid"
"""Top-level key of a foreign file or an override below which native keys may be set."""


DEFAULT_OF, WHOLE = " default of ", " file as a whole"
"""Markers in the origins of values that no key in the file sets: the original's default of a key, and values
derived from the file as a whole."""

ALL = "*"
"""Allows all unsupported keys, in place of their names."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A native tree with the origins of its values, and the ledger in the order of the foreign file."""

    written: Written
    ledger: tuple[Entry, ...]


def translate(
    foreign: Written,
    dialect: Dialect,
    *,
    backend: str | None = None,
    engine: str | None = None,
    allowed: Sequence[str] = (),
) -> Translation:
    """Translate a foreign file whose interpolations are resolved.

    `backend` and `engine` take precedence over the file's. `allowed` names unsupported keys (or sections)
    that may be ignored. Problems, including those of `foreign`, are in the result's `written.problems`.
    """
    tree = {key: value for key, value in foreign.tree.items() if key != NATIVE}
    leaves = list(_leaves(tree, lambda path: _takes_mapping(path, dialect)))
    native = Written(problems=list(foreign.problems), secrets=dict(foreign.secrets))
    values = _by_name(leaves, dialect, foreign, native.problems)
    native.problems += _refused(leaves, dialect, foreign)
    if native.problems:
        # Conversions rely on values that the table accepts: they do not see the others.
        why = {problem.key: problem.message for problem in native.problems}
        bad = {dialect.aliases.get(path, path) for path, _ in leaves if path in why}
        seen = Source(dialect, {name: value for name, value in values.items() if name not in bad})
        rows = (_entry(path, value, seen, foreign, why.get(path)) for path, value in leaves)
        return Translation(native, tuple(_without_secrets(row, foreign, Written()) for row in rows))
    below, prefix = foreign.tree.get(NATIVE), f"{NATIVE}."
    own = dict(_leaves(below)) if isinstance(below, dict) else {}
    kept = {path: of for path, of in foreign.references.items() if path.startswith(prefix)}
    native.references |= {path.removeprefix(prefix): of for path, of in kept.items()}
    source, writer = Source(dialect, values, backend, engine, own), _Writer(native)
    ledger = []
    for path, value in leaves:
        entry = _entry(path, value, source, foreign)
        if entry.disposition == "refused":
            native.problems.append(Problem(path, entry.note, entry.origin))
            ledger.append(entry)
            continue
        if entry.disposition == "unsupported" and not _is_allowed(path, allowed):
            message = f"{show_value(value)} is not supported: {entry.note}"
            message = f"{message}; to ignore it: --allow-unsupported {path}"
            native.problems.append(Problem(path, message, entry.origin))
        writer.put(entry.native, f"{entry.origin} {path}")
        ledger.append(_without_secrets(entry, foreign, native))
    for path, became in _defaults(source, native.problems):
        writer.fill(became.native, f"{dialect.title}{DEFAULT_OF}{path}")
    writer.fill(dialect.base(source), f"{dialect.title}{WHOLE}")
    for path, value in own.items():
        writer.replace(path, value, _origin(foreign, f"{NATIVE}.{path}"))
    for path, value in (("train.backend", backend), ("rollout.engine", engine)):
        if value is not None:
            writer.replace(path, value, "command line")
    writer.finish()
    if not native.problems:
        found = (problem for check in dialect.checks for problem in check(source))
        native.problems += [Problem(key, message, _origin(foreign, key)) for key, message in found]
    return Translation(native, tuple(ledger))


def _without_secrets(entry: Entry, foreign: Written, native: Written) -> Entry:
    """Replace secrets in a row by references: values that came from environment variables, and the variables
    set in cluster.env. References in native values are recorded in `native`."""
    secrets: dict[str, str] = {}
    if any(overlap(entry.path, path) for path in foreign.references):
        secrets |= foreign.secrets
    for path, value in entry.native.items():
        if path.startswith("cluster.env.") and isinstance(value, str):
            secrets[value] = f"${{oc.env:{path.removeprefix('cluster.env.')},null}}"
        elif path == "cluster.env" and isinstance(value, dict):
            secrets |= {text: f"${{oc.env:{name},null}}" for name, text in value.items() if text}
    if not secrets:
        return entry
    kept = {path: hidden(value, secrets) for path, value in entry.native.items()}
    native.references |= {
        path_text((*parse_path(path), *below)): item
        for path, value in kept.items()
        for below, item in config_leaves(value)
        if isinstance(item, Reference)
    }
    return replace(
        entry, value=hidden(entry.value, secrets), native=kept, note=hidden(entry.note, distinct(secrets))
    )


def defaults_tree(dialect: Dialect, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the tree over the original system's defaults, so that interpolations may refer to keys missing
    from the file."""
    out: dict[str, Any] = {}
    for path, rule in dialect.rules.items():
        if rule.disposition == "applied" and rule.default is not ABSENT and "*" not in path:
            place(out, parse_path(path), rule.default)
    return _merged(out, tree)


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        under = out.get(key)
        out[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return out


def _leaves(
    tree: Mapping[str, Any], is_value: Callable[[str], bool] = lambda _: False, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of everything except non-empty mappings, and of mappings that are values."""
    for key, value in tree.items():
        path = child(prefix, key)
        if isinstance(value, dict) and value and not is_value(path):
            yield from _leaves(value, is_value, path)
        else:
            yield path, value


def _by_name(
    leaves: Sequence[tuple[str, Any]], dialect: Dialect, foreign: Written, problems: list[Problem]
) -> dict[str, Any]:
    """Index the leaves by the table's spelling; two different values under two spellings of a key are a
    problem."""
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for path, value in leaves:
        name = dialect.aliases.get(path, path)
        if name in spelled and values[name] != value:
            message = f"is an alias of {spelled[name]}, which is {show_value(values[name])}; remove one"
            problems.append(Problem(path, message, _origin(foreign, path)))
        values[name] = value
        spelled[name] = path
    return values


def _refused(leaves: Sequence[tuple[str, Any]], dialect: Dialect, foreign: Written) -> Iterator[Problem]:
    """Yield problems of single leaves: unknown keys, and values that a key does not accept."""
    num_unknown = 0
    for path, value in leaves:
        rule = dialect.rule_of(dialect.aliases.get(path, path))
        if rule is None:
            is_section = _is_section(path, dialect)
            if not (is_section and value in (None, {})) and not _is_variable(path, dialect, foreign):
                num_unknown += 1
                message = f"unknown key of {dialect.title}"
                if num_unknown <= MAX_HINTS:
                    message = _unknown(path, value, dialect, is_section=is_section)
                yield Problem(path, message, _origin(foreign, path))
        elif not rule.takes.accepts(value):
            yield Problem(path, f"{show_value(value)} is not {rule.takes.words}", _origin(foreign, path))


def _takes_mapping(path: str, dialect: Dialect) -> bool:
    """Whether a mapping at a foreign path is a value. A path that matches a `*` rule and also has rules for
    keys below it is a section."""
    name = dialect.aliases.get(path, path)
    return name in dialect.rules or (dialect.rule_of(name) is not None and not _is_section(path, dialect))


def _is_section(path: str, dialect: Dialect) -> bool:
    heads = _heads((*dialect.rules, *dialect.aliases))
    parts = tuple(dialect.aliases.get(path, path).split("."))
    return parts in heads or any((*parts[:i], "*", *parts[i + 1 :]) in heads for i in range(len(parts)))


@cache
def _heads(paths: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    """Return the sections of a dialect: paths with keys below them; `*` matches any name."""
    split = [tuple(path.split(".")) for path in paths]
    return frozenset(parts[:end] for parts in split for end in range(1, len(parts)))


def _is_variable(path: str, dialect: Dialect, foreign: Written) -> bool:
    """Whether a leaf that the dialect does not know is the file's own variable: at the top level or in a
    separate section, with an interpolation that refers to it."""
    parts = path.split(".")
    above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return not _is_section(parts[0], dialect) and not foreign.variables.isdisjoint(above)


def _entry(path: str, value: Any, source: Source, foreign: Written, refused: str | None = None) -> Entry:
    """Build the ledger row of a leaf: refused, for a reason known before or because its conversion rejects
    the value, or translated."""
    origin, dialect = _origin(foreign, path), source.dialect
    name = dialect.aliases.get(path, path)
    if refused is not None:
        return Entry(path, value, "refused", {}, refused, origin)
    if (rule := dialect.rule_of(name)) is None:
        if _is_section(path, dialect):
            return Entry(path, value, "implied", {}, "an empty section: its keys have their defaults", origin)
        return Entry(path, value, "no effect", {}, f"a variable of the file, used as ${{{path}}}", origin)
    try:
        became = rule.become(value, replace(source, at=name))
    except ValueError as error:
        return Entry(path, value, "refused", {}, str(error), origin)
    notes = [f"alias of {name}" if name != path else "", became.note or rule.note]
    return Entry(path, value, became.disposition, became.native, "; ".join(filter(None, notes)), origin)


def _defaults(source: Source, problems: list[Problem]) -> Iterator[tuple[str, Became]]:
    for path, rule in source.dialect.rules.items():
        if rule.disposition != "applied" or rule.default is ABSENT or "*" in path or path in source.values:
            continue
        try:
            yield path, rule.become(rule.default, replace(source, at=path))
        except ValueError as error:
            problems.append(Problem(path, str(error), f"{source.dialect.title} default"))


def _unknown(path: str, value: Any, dialect: Dialect, *, is_section: bool) -> str:
    if is_section:
        return f"{show_value(value)} is not a mapping"
    known = [*dialect.rules, *dialect.aliases]
    homes = [name for name in known if name.rpartition(".")[2] == path.rpartition(".")[2]]
    near = suggest(path, known) or (f", did you mean {' or '.join(homes[:2])}?" if homes else "")
    return f"unknown key of {dialect.title}{near}"


def _is_allowed(path: str, allowed: Sequence[str]) -> bool:
    return ALL in allowed or any(path == name or path.startswith(f"{name}.") for name in allowed)


def _origin(foreign: Written, path: str) -> str:
    while path:
        if (found := foreign.origins.get(path)) is not None:
            return found
        path = path.rpartition(".")[0]
    return ""


class _Writer:
    """Collects native values for a tree. The first value of a native key stays; foreign keys that set it to
    different values are a problem."""

    def __init__(self, native: Written) -> None:
        self._native = native
        self._put: dict[str, Any] = {}

    def put(self, values: Mapping[str, Any], origin: str) -> None:
        for path, value in values.items():
            if path in self._put and self._put[path] != value:
                first = f"{self._native.origins[path]} sets it to {show_value(self._put[path])}"
                message = f"{origin} sets it to {show_value(value)}, but {first}; make them agree"
                self._native.problems.append(Problem(path, message, origin))
            else:
                self.replace(path, value, origin)

    def fill(self, values: Mapping[str, Any], origin: str) -> None:
        """Set values whose path, parents and children are all unset."""
        for path, value in values.items():
            if not any(overlap(path, other) for other in self._put):
                self.replace(path, value, origin)

    def replace(self, path: str, value: Any, origin: str) -> None:
        """Set the value, replacing any value at or below its path."""
        for below in [other for other in self._put if other.startswith((f"{path}.", f"{path}["))]:
            del self._put[below]
        self._put[path] = value
        self._native.origins[path] = origin

    def finish(self) -> None:
        """Build the tree: parents before children, list entries in order."""
        for path in sorted(self._put, key=lambda path: [(isinstance(k, int), k) for k in parse_path(path)]):
            if problem := place(self._native.tree, parse_path(path), self._put[path]):
                self._native.problems.append(Problem(path, problem, self._native.origins[path]))


def overlap(one: str, other: str) -> bool:
    """Whether two native paths are equal or one contains the other."""
    if one == other:
        return True
    long, short = (one, other) if len(one) > len(other) else (other, one)
    return long.startswith((f"{short}.", f"{short}["))
