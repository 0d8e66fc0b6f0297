"""Reads config text: YAML as plain data with the origin of every key, and `key=value` overrides.

Owns syntax and origins, and is independent of the schema. Scalars follow YAML 1.2: only true and false are
booleans, 1e-6 is a number, and there are no dates. Key paths are written `data.train[0].size`; overrides also
accept `data.train.0.size`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from braid.errors import ConfigError, Problem, suggest

ROOT = "config"
"""Key of problems that concern the whole file."""
OVERRIDE = "override"
"""Origin of values given on the command line."""
MAX_DEPTH = 50
"""Maximum nesting depth of mappings and lists."""
MAX_VALUES = 20_000
"""Maximum number of keys and values in a file, with aliases expanded."""
MAX_BYTES = 2**20
"""Maximum file size, in bytes."""
MAX_DIGITS = 308
"""Maximum digits of an integer: larger ones do not fit in a float."""
_TOO_DEEP = f"more than {MAX_DEPTH} levels of nested mappings and lists"
KeyPath = tuple[str | int, ...]
"""Components of a key path: ("data", "train", 0)."""


@dataclass(slots=True)
class Written:
    """The user's config as plain data (`tree`). `origins` maps each key path to where it was written
    ("file.yaml:12" or "override"); `problems` are the mistakes found while reading. `references` maps key
    paths to the text that replaces a value from environment variables when it is stored; `secrets` maps these
    values to their references. `variables` are the keys that interpolations refer to."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    references: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    variables: set[str] = field(default_factory=set)


def child(path: str, key: str | int) -> str:
    """The path of entry `key` below `path`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def read_file(path: Path) -> Written:
    """Read the mapping in a YAML file. Raises ConfigError if the file cannot be read or is not valid YAML;
    duplicate keys and unusable values are collected in `problems`."""
    text = _text_of(path)
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, path.name, text)]) from None
    except RecursionError:
        raise ConfigError([Problem(ROOT, _TOO_DEEP, path.name)]) from None
    except ValueError as error:  # raised by PyYAML for invalid characters
        raise ConfigError([Problem(ROOT, f"not valid YAML: {error}", path.name)]) from None
    written = Written()
    if root is None:
        return written
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ConfigError(
            [Problem(ROOT, f"the file contains {kind}; a config must be a mapping", f"{path.name}:1")]
        )
    written.tree = _Builder(path.name, written).value(root, "", ())
    return written


def apply_override(written: Written, text: str) -> None:
    """Set one value from `key=value`. The value is YAML; nothing after the `=` is the empty text. A mapping
    or list replaces the previous value; an index one past the end of a list appends."""
    key, equals, value = text.partition("=")
    path = parse_path(key.strip())
    if not equals or not path:
        hint = "; only one config file is allowed" if text.endswith((".yaml", ".yml")) else ""
        message = f"{text!r} is not an override; write key=value, for example run.seed=1{hint}"
        written.problems.append(Problem(ROOT, message, OVERRIDE))
        return
    name = path_text(path)
    try:
        parsed = _parse_value(value, written, name)
    except RecursionError:
        written.problems.append(Problem(name, _TOO_DEEP, OVERRIDE))
        return
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "not valid YAML"
        message = f"cannot parse the value {value!r} ({problem}); quote strings: '{key}=\"...\"'"
        written.problems.append(Problem(name, message, OVERRIDE))
        return
    if problem := place(written.tree, path, parsed):
        written.problems.append(Problem(name, problem, OVERRIDE))
        return
    below = [k for k in written.origins if k.startswith((f"{name}.", f"{name}["))]
    for stale in below:
        del written.origins[stale]
    for i in range(1, len(path) + 1):
        written.origins.setdefault(path_text(path[:i]), OVERRIDE)
    written.origins[name] = OVERRIDE


def path_text(path: KeyPath) -> str:
    """`("data", "train", 0)` as "data.train[0]"."""
    out = ""
    for key in path:
        out = child(out, key)
    return out


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """(key path, value) of every leaf, including empty mappings and lists."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def plain_scalar(text: str) -> Any:
    """Parse an unquoted YAML scalar: null, a boolean, a number, or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > MAX_DIGITS and _DIGITS.fullmatch(text):
        return text  # rejected by YAML source files
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _BASED_INT.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_DIGITS = re.compile(r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+")
_BASED_INT = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map")}
_TEXT = "tag:yaml.org,2002:str"


class _Builder:
    """Converts YAML nodes to plain data; origins and problems are added to `written`."""

    def __init__(self, file: str, written: Written) -> None:
        self._file = file
        self._written = written
        self._num_values = 0

    def _count(self, node: yaml.Node, path: str) -> None:
        """Raise ConfigError if the expanded aliases exceed MAX_VALUES."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            message = f"more than {MAX_VALUES:,} keys and values after expanding aliases (*name)"
            raise ConfigError([Problem(path or ROOT, message, self._where(node))])

    def value(self, node: yaml.Node, path: str, parents: tuple[yaml.Node, ...]) -> Any:
        """Convert `node`, which is at key `path` below `parents`."""
        self._count(node, path)
        if any(node is parent for parent in parents):
            return self._problem(
                path, node, "an alias (*name) must not refer to a node that contains it; remove it"
            )
        if node.tag not in _TAGS:
            return self._problem(path, node, f"the YAML tag {node.tag!r} is not supported; remove it")
        if len(parents) == MAX_DEPTH:
            return self._problem(path, node, _TOO_DEEP)
        parents = (*parents, node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, parents)
        if isinstance(node, yaml.SequenceNode):
            return [self._entry(item, child(path, i), item, parents) for i, item in enumerate(node.value)]
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None and node.tag == _TEXT
        if is_plain and len(node.value) > MAX_DIGITS and _DIGITS.fullmatch(node.value):
            return self._problem(
                path,
                node,
                f"an integer of {len(node.value):,} digits; at most {MAX_DIGITS} are allowed",
            )
        return plain_scalar(node.value) if is_plain else node.value

    def _entry(self, node: yaml.Node, path: str, at: yaml.Node, parents: tuple[yaml.Node, ...]) -> Any:
        self._written.origins[path] = self._where(at)
        return self.value(node, path, parents)

    def _mapping(self, node: yaml.MappingNode, path: str, parents: tuple[yaml.Node, ...]) -> dict[str, Any]:
        pairs = self._pairs(node, path, parents)
        return {
            name: self._entry(item, child(path, name), key, parents) for name, (key, item) in pairs.items()
        }

    def _pairs(
        self, node: yaml.MappingNode, path: str, parents: tuple[yaml.Node, ...]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key -> (key node, value node). The mapping's own keys override those merged by `<<`, and earlier
        merged mappings override later ones."""
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, item in node.value:
            self._count(key, path)
            if not isinstance(key, yaml.ScalarNode):
                self._problem(path or ROOT, key, "a key must be a plain scalar")
            elif key.value == "<<" and key.style is None:
                for source in item.value if isinstance(item, yaml.SequenceNode) else [item]:
                    if not isinstance(source, yaml.MappingNode) or any(
                        source is parent for parent in parents
                    ):
                        self._problem(
                            path or ROOT,
                            key,
                            "<< needs a mapping, or a list of mappings, that does not contain it",
                        )
                    else:
                        merged = self._pairs(source, path, (*parents, source)) | merged
            elif key.value in own:
                first = self._where(own[key.value][0])
                self._problem(child(path, key.value), key, f"duplicate key, first set at {first}; remove one")
            else:
                own[key.value] = (key, item)
        return merged | own

    def _where(self, node: yaml.Node) -> str:
        return OVERRIDE if self._file == OVERRIDE else f"{self._file}:{node.start_mark.line + 1}"

    def _problem(self, path: str, node: yaml.Node, message: str) -> None:
        self._written.problems.append(Problem(path, message, self._where(node)))


def _text_of(path: Path) -> str:
    if path.is_dir():
        names = sorted(p.name for p in path.glob("*.y*ml"))
        have = f", such as {', '.join(names[:5])}" if names else ""
        raise ConfigError([Problem(ROOT, f"{path} is a folder; pass a .yaml file{have}", "command line")])
    try:
        if path.stat().st_size > MAX_BYTES:
            message = f"the file has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are allowed"
            raise ConfigError([Problem(ROOT, message, path.name)])
        return path.read_text("utf-8")
    except FileNotFoundError:
        near = suggest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        raise ConfigError([Problem(ROOT, f"no such file: {path}{near}", "command line")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            [Problem(ROOT, f"the file is not UTF-8 text ({error.reason})", path.name)]
        ) from None
    except OSError as error:
        raise ConfigError([Problem(ROOT, f"cannot read {path}: {error.strerror}", "command line")]) from None


def _syntax_problem(error: yaml.YAMLError, file: str, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    message = f"not valid YAML: {what}" + (f" ({context})" if context else "")
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "'\\t'" in message:
        message += "; indent YAML with spaces, not tabs"
    elif "but found another document" in message:
        message += "; a config is a single document, remove the line ---"
    elif "${" in line and "flow" in message:
        message += "; quote ${...} inside { } and [ ]"
    return Problem(ROOT, message, place)


def parse_path(text: str) -> KeyPath:
    """Split `data.train.0.size` or `data.train[0].size` into keys; empty if it is not a valid path."""
    dotted = re.sub(r"\[(\d+)\]", r".\1", text)
    parts = dotted.split(".")
    if not all(parts) or re.search(r"[\s\[\]{}]", dotted):
        return ()
    return tuple(int(part) if part.isdecimal() and i else part for i, part in enumerate(parts))


def _parse_value(text: str, written: Written, name: str) -> Any:
    if not text:
        return ""
    node = yaml.compose(text, Loader=yaml.BaseLoader)
    if node is None:
        return plain_scalar(text.strip())
    return _Builder(OVERRIDE, written).value(node, name, ())


def place(tree: dict[str, Any], path: KeyPath, value: Any) -> str | None:
    """Set `value` at `path`, creating mappings and lists as needed. Returns an error message if that is
    impossible."""
    at: Any = tree
    for i, key in enumerate(path):
        is_last = i == len(path) - 1
        below: Any = value if is_last else ([] if isinstance(path[i + 1], int) else {})
        if isinstance(at, dict):
            key = str(key)
            if is_last or at.get(key) is None:
                at[key] = below
        elif isinstance(at, list) and isinstance(key, int) and key <= len(at):
            if key == len(at):
                at.append(below)
            elif is_last or at[key] is None:
                at[key] = below
        elif isinstance(at, list):
            return f"{path_text(path[:i])} is a list of length {len(at)}; {key!r} is not an index from 0 to {len(at)}"
        else:
            return f"{path_text(path[:i])} is {at!r}, which has no keys"
        at = at[key]  # pyright: ignore[reportArgumentType, reportCallIssue]  # a list has been given an index
    return None
