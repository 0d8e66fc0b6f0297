"""Loads a YAML file and overrides into a frozen RunConfig, with the origin of every value.

text ─source.py─> tree with origins ─OmegaConf─> interpolations resolved ─schema─> RunConfig
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from braid.errors import ConfigError, Problem, suggest
from braid.functions import NONE_PASSED, Passed
from braid.sections import Section

from .explain import explain, unlike_numbers
from .kinds import kinds_of
from .moved import MOVED
from .resolvers import MAX_NUMBER, RESOLVERS, register_resolvers
from .run_folder import is_of_run, relocate
from .schema import RunConfig
from .secrets import (
    Reference,
    distinct,
    environment_values,
    hidden,
    is_secret_variable,
    plain_secrets,
    reference_for,
)
from .shape import fields_of, section_for, sections_of
from .source import (
    DEFAULT,
    OVERRIDE,
    ROOT,
    KeyPath,
    Written,
    apply_override,
    is_within,
    leaves,
    map_values,
    parse_path,
    path_text,
    place,
    plain_scalar,
    read_file,
)

_MAX_SHOWN = 200
"""Maximum length of an interpolation in messages, in characters."""
_REFERRED = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*\}")
"""An interpolation that refers to a key, by its full path."""
FAMILIES = {path: family for path, field in fields_of(RunConfig) if (family := kinds_of(field)) is not None}
"""Keys that hold a kind -> its family."""
KINDS = {
    path: family.default_kind if isinstance(family.default_kind, str) else None
    for path, family in FAMILIES.items()
}
"""The same -> the kind of settings without one; None where it depends on the recipe."""
_OF_AN_EARLIER_VERSION = (
    "an earlier version of braid made this run, with keys such as {}, which are not read; use that version, "
    "or move the keys below in {} to where they are now, and remove those of kinds that the run does not have"
)
MANDATORY = "???"
"""Placeholder for a value that must be given on the command line."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config and its origins.

    `origins` maps the key path of every leaf to "file.yaml:12", "override" or "default". Relative paths of
    data files and functions start from `base_dir`. `path` is the config file, None without one. `kept` has
    further texts to store in the run's folder, by file name: for a config in another framework's format, its
    source and the record of how each key was converted. `references` and `secrets` are those of
    source.Written.
    """

    config: RunConfig
    origins: Mapping[str, str] = field(repr=False)
    base_dir: Path
    path: Path | None = None
    kept: Mapping[str, str] = field(default_factory=dict, repr=False)
    references: Mapping[str, Any] = field(default_factory=dict, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    foreign_keys: Mapping[str, str] | None = field(default=None, repr=False)
    """Of a config in another framework's format: native key -> the key of the file that sets it."""
    functions: Passed = field(default_factory=dict, repr=False)
    """Those passed to the Python API, by the paths that the config names."""

    def to_show(self) -> dict[str, Any]:
        """The config as plain data without secrets: values from environment variables, and secrets
        that `cluster.env` sets, are replaced by references."""
        data = map_values(plain_data(self.config), self.references.get)
        env = data["cluster"]["env"]
        for name, value in env.items():
            if value is not None and not isinstance(value, Reference) and is_secret_variable(name, value):
                env[name] = Reference(f"${{oc.env:{name},null}}")
        return data

    def origin(self, key: str) -> str:
        """Where `key` was set. For a section: the origin of its first value that the user set; for an unknown
        key: the origin of the section around it."""
        path = parse_path(key)
        for end in range(len(path), 0, -1):
            near = path_text(path[:end])
            origins = [origin for name, origin in self.origins.items() if is_within(name, near)]
            if origins:
                return next((origin for origin in origins if origin != DEFAULT), DEFAULT)
        return DEFAULT

    def placed(self, problem: Problem) -> Problem:
        """Add the origin of its key to a problem, for callers that know keys but no origins."""
        origin = self.origin(problem.key)
        message = hidden(problem.message, distinct(self.secrets))
        placed = replace(problem, message=message, origin=problem.origin if origin == DEFAULT else origin)
        return placed if self.foreign_keys is None else in_keys_of_file(placed, self.foreign_keys)


_KEY = re.compile(r"(?<![\w./-])([a-z_]\w*(?:\[\d+\])?(?:\.[a-z_]\w*(?:\[\d+\])?)+)(=[\w.\-]*[\w\-])?")
"""A key of the config in a message, and the value that it is said to have or to need."""


def in_keys_of_file(problem: Problem, foreign_keys: Mapping[str, str]) -> Problem:
    """A problem of a config in another framework's format, in the keys of its file; those that it does not
    set are keys of braid, which are written below `braid`."""

    def key_of(native: str) -> str:
        """The key that sets `native` or a section around it."""
        around = (foreign for name, foreign in foreign_keys.items() if is_within(native, name))
        kind = foreign_keys.get(f"{native}.kind", "")
        return foreign_keys.get(native) or next(around, kind)

    def in_foreign_keys(match: re.Match[str]) -> str:
        native, value = match[1], match[2] or ""
        if native.partition(".")[0] not in RunConfig.model_fields or native in foreign_keys.values():
            return match[0]
        foreign = key_of(native)
        return f"{foreign} (braid.{native}{value})" if foreign else f"braid.{native}{value}"

    if problem.key in foreign_keys.values() or problem.key.partition(".")[0] not in RunConfig.model_fields:
        return problem
    below = (foreign for name, foreign in foreign_keys.items() if is_within(name, problem.key))
    key = key_of(problem.key) or next(below, "")
    if not key or problem.origin == OVERRIDE:  # those of keys of the file name the key, too
        key = f"braid.{problem.key}"
    return replace(problem, key=key, message=_KEY.sub(in_foreign_keys, problem.message))


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    backend: str | None = None,
    engine: str | None = None,
    functions: Passed = NONE_PASSED,
) -> Loaded:
    """Read, override, interpolate and validate a config; without a `path`, from overrides only. The config of
    a run folder is that of the folder in which it is. `backend` and `engine` take precedence over
    train.backend and rollout.engine. `functions` are those passed to the Python API.

    Raises one ConfigError with all problems found, each with its origin.
    """
    file = None if path is None else Path(path)
    written = Written() if file is None else read_file(file)
    if file is not None:
        relocate(written, file)
    chosen = {"train.backend": backend, "rollout.engine": engine}
    for text in (*overrides, *(f"{key}={value}" for key, value in chosen.items() if value is not None)):
        apply_override(written, text, KINDS)
    if not written.tree and file is not None:
        why = (
            "the file is empty, or has only comments; a config has at least a model, as in "
            "examples/quickstart.yaml"
        )
        raise ConfigError([Problem("config", why, file.name)])
    written.tree = interpolate(written, with_defaults)
    return validate(written, file, functions)


def validate(written: Written, file: Path | None, functions: Passed = NONE_PASSED) -> Loaded:
    """Build the config from a tree without interpolations. Raises ConfigError with the problems in `written`
    and all others found, at most one of each key.

    Relative paths start from the folder of `file`, or from the working directory without one.
    """
    _give_defaults(written)
    tree, config = written.tree, None
    missing = [path_text(path) for path, value in leaves(tree) if value == MANDATORY]
    complaints = [(name, f"required; set it on the command line: {name}=VALUE") for name in missing]
    complaints += unlike_numbers(tree)
    if file is not None and is_of_run(file) and (former := MOVED.keys() & _sections_in(tree)):
        written.problems.append(Problem(ROOT, _OF_AN_EARLIER_VERSION.format(min(former), file), file.name))
    folder = Path.cwd() if file is None else file.resolve().parent
    run = tree.get("run")
    base_dir = folder / str((run.get("base_dir") if isinstance(run, dict) else None) or "")
    try:
        config = RunConfig.model_validate(tree, context={"base_dir": base_dir, "functions": functions})
        complaints += plain_secrets(config, written.references)
    except ValidationError as error:
        complaints += explain(error, tree)
    known = {problem.key for problem in written.problems}
    for key, message in complaints:
        if key not in known:
            known.add(key)
            written.problems.append(Problem(key, message, _origin_of(written, key)))
    if written.problems or config is None:
        secrets = distinct(written.secrets)
        problems = sorted(written.problems, key=_line)
        raise ConfigError([replace(p, message=hidden(p.message, secrets)) for p in problems])
    written_at = {path_text(path): written.origin_of(path) for path, _ in leaves(tree)}
    names = [path_text(path) for path, _ in leaves(plain_data(config))]
    origins = {
        name: written_at.get(name) or written_at.get(name.removesuffix(".kind"), DEFAULT) for name in names
    }
    return Loaded(
        config,
        origins,
        base_dir,
        file,
        references=written.references,
        secrets=written.secrets,
        functions=functions,
    )


def _sections_in(tree: Mapping[str, Any]) -> set[str]:
    """The keys of a tree with the sections that hold them."""
    return {path_text(path[:end]) for path, _ in leaves(tree) for end in range(1, len(path) + 1)}


def _origin_of(written: Written, key: str) -> str:
    """The origin of a value, or of a section: that of its kind, or of all its values if they share it."""
    origin = written.origin_of(parse_path(key))
    if origin != DEFAULT:
        return origin
    below = {where for name, where in written.origins.items() if is_within(name, key)}
    return written.origins.get(f"{key}.kind") or (below.pop() if len(below) == 1 else DEFAULT)


def _give_defaults(written: Written) -> None:
    """Remove the sections that the command line sets to null and that cannot be null: they get their
    defaults."""
    fields = dict(fields_of(RunConfig))
    for path, value in list(leaves(written.tree)):
        if value is not None or written.origin_of(path) != OVERRIDE:
            continue
        field = fields.get(re.sub(r"\[\d+\]", "[]", path_text(path)))
        if field is None or field.is_required() or not sections_of(field):
            continue
        if type(None) not in get_args(field.annotation):
            above: Any = written.tree
            for key in path[:-1]:
                above = above[key]
            del above[path[-1]]


def to_yaml(loaded: Loaded) -> str:
    """The whole config with all defaults as YAML text that loads as the same config, from any folder."""
    data = loaded.to_show()
    data["run"]["base_dir"] = str(loaded.base_dir)
    return yaml_text(data)


def yaml_text(data: Mapping[str, Any]) -> str:
    """Plain data as YAML text that reads back as the same data."""
    escaped = map_values(data, _escaped)
    return yaml.dump(escaped, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def plain_data(value: Any) -> Any:
    """Convert a config or a section to mappings, lists and plain values."""
    return to_jsonable_python(value)


def _line(problem: Problem) -> int:
    """Sort key of a problem: the line of its origin, 0 if it has none."""
    position = re.search(r":(\d+)(:\d+)?$", problem.origin)
    return int(position[1]) if position else 0


def interpolate(written: Written, context_of: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The tree with every `${...}` resolved; problems are added to `written`.

    `context_of` returns the tree that interpolations may refer to: the given tree merged over its defaults.
    """
    tree = written.tree
    pending = [(path, text) for path, text in leaves(tree) if isinstance(text, str) and "${" in text]
    if not pending:
        return tree
    register_resolvers()
    secrets = environment_values(text for _, text in pending)
    written.secrets |= secrets
    written.variables |= {name for _, text in pending for name in _REFERRED.findall(text)}
    whole = deepcopy(context_of(tree))
    malformed = {path: why for path, text in leaves(whole) if (why := _malformed(text))}
    for path in malformed:
        place(whole, path, None)
    context = OmegaConf.create(_mentioned(whole, pending))
    for path, text in pending:
        value, problem = None, None
        if path in malformed:
            problem = (
                f"{text!r} is not a valid interpolation: {malformed[path]}; write ${{key}}, or "
                f"\\${{ for a literal ${{"
            )
        else:
            try:
                value = _resolve(context, path)
            except (OmegaConfBaseException, RecursionError) as error:
                problem = _interpolation_message(error, text, whole)
        if any(isinstance(item, int) and abs(item) > MAX_NUMBER for _, item in leaves(value)):
            problem = f"{text} is an integer above the maximum of {MAX_NUMBER:.0e}"
        if problem:
            written.problems.append(Problem(path_text(path), problem, written.origin_of(path)))
            continue
        place(tree, path, value)
        kept = leaves(reference_for(text, value, secrets), path)
        written.references |= {path_text(key): item for key, item in kept if isinstance(item, Reference)}
    return tree


_COMPUTED_NAME = re.compile(r"\$\{[^:}]*\$\{|oc\.(select|dict|decode|deprecated)[^}]*\$\{")
"""An interpolation whose key is itself interpolated."""


def _mentioned(tree: dict[str, Any], pending: Sequence[tuple[KeyPath, str]]) -> dict[str, Any]:
    """The sections that interpolations are in or may refer to: OmegaConf takes long to wrap all defaults."""
    texts = " ".join(text for _, text in pending)
    sections = {path[0] for path, _ in pending}
    if _COMPUTED_NAME.search(texts):
        return tree
    return {key: value for key, value in tree.items() if key in sections or key in texts}


def _malformed(text: Any) -> str:
    """Why a text is not a valid interpolation; empty if it is one."""
    if not isinstance(text, str) or "${" not in text:
        return ""
    try:
        OmegaConf.create({"value": text})
    except GrammarParseError as error:
        return str(error).splitlines()[0]
    return ""


def _resolve(context: Any, path: KeyPath) -> Any:
    for key in path:
        context = context[key]
    return OmegaConf.to_container(context, resolve=True) if OmegaConf.is_config(context) else context


def with_defaults(tree: Mapping[str, Any], section: type[Section] = RunConfig) -> dict[str, Any]:
    """Merge the user's values over the schema's defaults, so that interpolations can refer to both."""
    filled = {
        name: plain_data(field.get_default(call_default_factory=True))
        for name, field in section.model_fields.items()
        if not field.is_required()
    }
    for key, value in tree.items():
        field = section.model_fields.get(key)
        family = None if field is None else kinds_of(field)
        if family is not None:
            value = family.with_kind(value)
        # settings of a recipe's kind are merged with the recipe's, which is only known once all values are
        is_open = family is not None and callable(family.default_kind)
        filled[key] = value if field is None or is_open else _filled(value, sections_of(field))
    return filled


def _filled(value: Any, sections: tuple[type[Section], ...]) -> Any:
    if isinstance(value, list):
        return [_filled(item, sections) for item in value]
    section = section_for(value, sections) if isinstance(value, dict) else None
    return value if section is None else with_defaults(value, section)


def _interpolation_message(error: Exception, text: str, tree: Mapping[str, Any]) -> str:
    """Error message for an interpolation that cannot be resolved."""
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    first = str(error).splitlines()[0]
    quoted = re.findall(r"'([^']*)'", first)
    if isinstance(error, RecursionError) or "ecursi" in first or "parent node" in first:
        return f"{text} is a circular reference; remove one of its links"
    if "Environment variable" in first:
        variable = quoted[-1]
        return (
            f"{text}: the environment variable {variable} is not set; set it, or give a default: "
            f"${{oc.env:{variable},default}}"
        )
    if isinstance(error, InterpolationKeyError):
        known = [path_text(path) for path, _ in leaves(tree)]
        return f"{text}: unknown key {quoted[0]!r}{suggest(quoted[0], known)}"
    if isinstance(error, UnsupportedInterpolationType):
        name = first.rpartition(" ")[2]
        known = [*RESOLVERS, "oc.env", "oc.decode", "oc.select"]
        return f"{text}: unknown resolver {name!r}{suggest(name, known)}; available: {', '.join(known)}"
    if isinstance(error, InterpolationToMissingValueError):
        return f"{text} refers to a value that is not set yet ({MANDATORY})"
    reason = str(error.__cause__ or error.__context__ or first)
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", reason)
    return f"cannot evaluate {text}: {reason}"


def _escaped(_: str, value: Any) -> Any:
    """Escape `${` in texts, so that loading returns the same text."""
    if isinstance(value, Reference):
        return str(value)
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes text that source.py would read differently, and writes lists of plain values on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.Node:
        is_ambiguous = plain_scalar(data) != data
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if is_ambiguous else None)

    def represent_items(self, data: list[Any]) -> yaml.Node:
        is_plain = not any(isinstance(item, dict | list) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_plain)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_items)
