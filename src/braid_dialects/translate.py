"""Translation of a foreign config tree to a native one, with a ledger that accounts for every leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from braid.config.explain import MAX_HINTS, show_value
from braid.config.load import FAMILIES, KINDS
from braid.config.secrets import Reference, distinct, hidden, is_secret_variable
from braid.config.source import Written, child, is_within, leaves, parse_path, path_text, place
from braid.errors import Problem, suggest

from .table import Became, Dialect, Entry, Source
from .values import MAX_INTEGER

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
    dialect: Dialect
    """That of the file."""


def translate(
    foreign: Written,
    dialect: Dialect,
    *,
    backend: str | None = None,
    engine: str | None = None,
    allowed: Sequence[str] = (),
    version: str | None = None,
) -> Translation:
    """Translate a foreign file whose interpolations are resolved.

    `backend` and `engine` take precedence over the file's. `allowed` names unsupported keys (or sections)
    that may be ignored. `version` is that of the original system, detected from the file if None.
    Problems, including those of `foreign`, are in the result's `written.problems`.
    """
    below = foreign.tree.get(NATIVE)
    braid_values = dict(_leaves(below)) if isinstance(below, dict) else {}
    braid_values = {_key_of_kind(path, value): value for path, value in braid_values.items()}
    tree = {key: value for key, value in foreign.tree.items() if key != NATIVE}
    dialect = dialect.of_file(dialect, dict(_leaves(tree, dialect.takes_mapping)), version)
    leaves = list(_leaves(tree, dialect.takes_mapping))
    native = Written(problems=list(foreign.problems), secrets=dict(foreign.secrets))
    if (absent := dialect.absent_in(dict(leaves))) is not None:
        return _refused_whole(foreign, dialect, leaves, *absent)
    native.problems += (
        Problem(path, dialect.in_file(why), _origin(foreign, path))
        for path, why in _mistakes(leaves, dialect, foreign)
    )
    # Conversions rely on values that the table accepts: they do not see the others.
    wrong = {problem.key: problem.message for problem in native.problems}
    bad = {dialect.name_of(path) for path, _ in leaves if path in wrong}
    values = {name: value for path, value in leaves if (name := dialect.name_of(path)) not in bad}
    source = Source(dialect, values, backend, engine, braid_values)
    ledger = [_entry(path, value, source, foreign, wrong.get(path)) for path, value in leaves]
    if native.problems:
        shown = tuple(_without_secrets(entry, foreign, Written()) for entry in ledger)
        return Translation(native, shown, dialect)

    for path, reference in foreign.references.items():
        if path.startswith(f"{NATIVE}."):
            native.references[path.removeprefix(f"{NATIVE}.")] = reference
    native.problems += _stopping(ledger, allowed)
    writer = _Writer(native)
    for entry in ledger:
        writer.put(entry.native, f"{entry.origin} {entry.path}")
    shown = tuple(_without_secrets(entry, foreign, native) for entry in ledger)
    for path, became in _defaults(source, native.problems):
        path = dialect.in_file(path)
        writer.fill(became.native, f"{dialect.full_title}{DEFAULT_OF}{path}")
    writer.fill(dialect.base(source), f"{dialect.full_title}{WHOLE}")
    for path, value in braid_values.items():
        writer.replace(path, value, _origin(foreign, f"{NATIVE}.{path}"))
    for path, value in (("train.backend.kind", backend), ("rollout.engine.kind", engine)):
        if value is not None:
            writer.replace(path, value, "command line")
    dropped = dict(writer.drop_of_other_kinds(braid_values))
    shown = tuple(_without(entry, dropped) for entry in shown)
    writer.leave_precision(braid_values, f"{dialect.full_title}{WHOLE}")
    writer.finish()
    if not native.problems:
        findings = (problem for check in dialect.checks for problem in check(source))
        native.problems += [
            Problem(dialect.in_file(key), dialect.in_file(message), _origin(foreign, dialect.in_file(key)))
            for key, message in findings
        ]
    return Translation(native, shown, dialect)


def _key_of_kind(path: str, value: Any) -> str:
    """The key of a native value: the name of a kind alone keeps its settings."""
    return f"{path}.kind" if KINDS.get(path) and isinstance(value, str) else path


def _without(entry: Entry, dropped: Mapping[str, str]) -> Entry:
    """A ledger row without the native keys that were dropped; unused if none is left."""
    native = {path: value for path, value in entry.native.items() if path not in dropped}
    if native or not entry.native:
        return replace(entry, native=native)
    return replace(entry, native={}, disposition="unused", note=dropped[next(iter(entry.native))])


def _stopping(ledger: Sequence[Entry], allowed: Sequence[str]) -> Iterator[Problem]:
    """The rows that stop a run: refused ones, and unsupported ones unless they are allowed."""
    for entry in ledger:
        if entry.disposition == "refused":
            yield Problem(entry.path, entry.note, entry.origin)
        elif entry.disposition == "unsupported" and not _is_allowed(entry.path, allowed):
            why = f"{show_value(entry.value)} is not supported: {entry.note}"
            yield Problem(entry.path, f"{why}; to ignore it: --allow-unsupported {entry.path}", entry.origin)


def _refused_whole(
    foreign: Written, dialect: Dialect, leaves: Sequence[tuple[str, Any]], key: str, name: str
) -> Translation:
    """The translation of a file that asks, with `key`, for the pipeline or method `name`, which braid
    lacks."""
    native = Written(problems=list(foreign.problems), secrets=dict(foreign.secrets))
    why = f"{show_value(dict(leaves)[key])} is not supported: {name}"
    native.problems.append(Problem(key, why, _origin(foreign, key)))
    ledger: list[Entry] = []
    for path, value in leaves:
        is_known = path != key and dialect.rule_of(path) is not None
        note = "the pipeline or method of the file is not supported" if is_known else name
        disposition = "no effect" if is_known else "unsupported"
        entry = Entry(path, value, disposition, {}, note, _origin(foreign, path))
        ledger.append(_without_secrets(entry, foreign, Written()))
    return Translation(native, tuple(ledger), dialect)


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


def _mistakes(
    leaves: Sequence[tuple[str, Any]], dialect: Dialect, foreign: Written
) -> Iterator[tuple[str, str]]:
    """Yield (path, error) of unknown keys, of values that a key does not accept, and of different values
    under two spellings of a key."""
    spelled: dict[str, tuple[str, Any]] = {}
    num_unknown = 0
    for path, value in leaves:
        first, other = spelled.setdefault(dialect.name_of(path), (path, value))
        if other != value:
            yield path, f"is an alias of {first}, which is {show_value(other)}; remove one"
        if (rule := dialect.rule_of(path)) is not None:
            if not rule.takes.accepts(value):
                is_large = isinstance(value, int) and abs(value) > MAX_INTEGER
                limit = "; integers have at most 64 bits" if is_large else ""
                yield path, f"{show_value(value)} is not {rule.takes.words}{limit}"
        elif dialect.is_section(path):
            if value not in (None, {}):
                yield path, f"{show_value(value)} is not a mapping"
        elif not _is_variable(path, dialect, foreign):
            num_unknown += 1
            near = _near(path, dialect) if num_unknown <= MAX_HINTS else ""
            yield path, f"unknown key of {dialect.title}{near}"


def _is_variable(path: str, dialect: Dialect, foreign: Written) -> bool:
    """Whether a leaf that the dialect does not know is the file's own variable: at the top level or in a
    separate section, with an interpolation that refers to it."""
    section = path.partition(".")[0]
    return not dialect.is_section(section) and any(is_within(path, name) for name in foreign.variables)


def _near(path: str, dialect: Dialect) -> str:
    known = [*dialect.rules, *(alias for alias in dialect.aliases if dialect.rule_of(alias))]
    path = dialect.name_of(path)
    if longer := [name for name in known if name.endswith(f".{path}")]:
        return f", did you mean {' or '.join(longer[:2])}?"
    homes = [name for name in known if name.rpartition(".")[2] == path.rpartition(".")[2]]
    return suggest(path, homes or known) or (f", did you mean {' or '.join(homes[:2])}?" if homes else "")


def _entry(path: str, value: Any, source: Source, foreign: Written, wrong: str | None) -> Entry:
    """Build the ledger row of a leaf: refused if it is wrong or its conversion rejects it, or translated."""
    origin, dialect = _origin(foreign, path), source.dialect
    if wrong is not None:
        return Entry(path, value, "refused", {}, wrong, origin)
    if (rule := dialect.rule_of(path)) is None:
        if dialect.is_section(path):
            return Entry(path, value, "implied", {}, "an empty section: its keys have their defaults", origin)
        return Entry(path, value, "no effect", {}, f"a variable of the file, used as ${{{path}}}", origin)
    name = dialect.name_of(path)
    try:
        became = rule.become(value, replace(source, at=name))
    except ValueError as error:
        return Entry(path, value, "refused", {}, dialect.in_file(str(error)), origin)
    is_alias = dialect.in_file(name) != path and rule.disposition != "no effect"
    notes = [f"alias of {name}" if is_alias else "", dialect.in_file(became.note or rule.note)]
    return Entry(path, value, became.disposition, became.native, "; ".join(filter(None, notes)), origin)


def _defaults(source: Source, problems: list[Problem]) -> Iterator[tuple[str, Became]]:
    for path, default in source.dialect.defaults.items():
        if path not in source.values:
            try:
                yield path, source.dialect.rules[path].become(default, replace(source, at=path))
            except ValueError as error:
                problems.append(Problem(path, str(error), f"{source.dialect.full_title} default"))


def _without_secrets(entry: Entry, foreign: Written, native: Written) -> Entry:
    """Replace secrets in a row by references: values that came from environment variables, and the secrets
    among those that cluster.env sets. References in native values are recorded in `native`."""
    from_variables = any(overlap(entry.path, path) for path in foreign.references)
    secrets = dict(foreign.secrets) if from_variables else {}
    for path, value in entry.native.items():
        for at, text in leaves(value, parse_path(path)):
            match at, text:
                case ("cluster", "env", str(name), *_), str(secret) if secret and is_secret_variable(
                    name, secret
                ):
                    secrets[secret] = f"${{oc.env:{name},null}}"
                case _:
                    pass
    if not secrets:
        return entry
    kept = {path: hidden(value, secrets) for path, value in entry.native.items()}
    for path, value in kept.items():
        for at, item in leaves(value, parse_path(path)):
            if isinstance(item, Reference):
                native.references[path_text(at)] = item
    note = hidden(entry.note, distinct(secrets))
    return replace(entry, value=hidden(entry.value, secrets), native=kept, note=note)


def _is_allowed(path: str, allowed: Sequence[str]) -> bool:
    return ALL in allowed or any(is_within(path, name) for name in allowed)


def _origin(foreign: Written, path: str) -> str:
    while path and path not in foreign.origins:
        path = path.rpartition(".")[0]
    return foreign.origins.get(path, "")


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
                message = f"{show_value(value)} here, but {first}: both are {NATIVE}.{path}; make them agree"
                where, _, key = origin.rpartition(" ")
                self._native.problems.append(Problem(key, message, where))
            else:
                self.replace(path, value, origin)

    def drop_of_other_kinds(self, braid_values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Remove settings that the chosen engines and backends do not have, but for those of `braid_values`;
        yields their keys and the reason."""
        for at, default in KINDS.items():
            kind = self._put.get(f"{at}.kind", default)
            if not default or (chosen := FAMILIES[at].kinds.get(kind)) is None:
                continue
            for path in [path for path in self._put if path.startswith(f"{at}.")]:
                name = path.removeprefix(f"{at}.").partition(".")[0]
                if name not in chosen.model_fields and path not in braid_values:
                    del self._put[path]
                    yield path, f"{at} is {kind}, which does not have {name}"

    def leave_precision(self, braid_values: Mapping[str, Any], origin: str) -> None:
        """Without a correction for an engine of lower precision, unless `braid_values` choose it: the
        originals have one only if asked to."""
        is_native = self._put.get("rollout.engine.kind", "native") == "native"
        is_half = is_native and self._put.get("rollout.engine.dtype") in ("bf16", "fp16")
        if is_half and "rollout.engine.dtype" not in braid_values and not self._put.get("pipeline.max_lag"):
            self.fill({"algorithm.corrections": []}, origin)

    def fill(self, values: Mapping[str, Any], origin: str) -> None:
        """Set values whose path, parents and children are all unset."""
        for path, value in values.items():
            if not any(overlap(path, other) for other in self._put):
                self.replace(path, value, origin)

    def replace(self, path: str, value: Any, origin: str) -> None:
        """Set the value, replacing any value at or below its path."""
        self._put = {other: old for other, old in self._put.items() if not is_within(other, path)}
        self._put[path] = value
        self._native.origins[path] = origin

    def finish(self) -> None:
        """Build the tree: parents before children, list entries in order."""
        for path in sorted(self._put, key=lambda path: [(isinstance(k, int), k) for k in parse_path(path)]):
            if problem := place(self._native.tree, parse_path(path), self._put[path]):
                self._native.problems.append(Problem(path, problem, self._native.origins[path]))


def overlap(one: str, other: str) -> bool:
    """Whether two native paths are equal or one contains the other."""
    return is_within(one, other) or is_within(other, one)
