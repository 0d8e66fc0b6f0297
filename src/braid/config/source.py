"""Reads config text, independent of the schema: YAML as plain data with the origin of every key, and
overrides.

Scalars follow YAML 1.2: only true and false are booleans, 1e-6 is a number, and there are no dates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os.path import isdir  # False for names that no file can have
from pathlib import Path
from typing import Any

import yaml

from braid.errors import ConfigError, Problem, suggest

ROOT = "config"  # key of problems that concern the whole file
DEFAULT = "default"  # origin of values that the user did not set
OVERRIDE = "override"  # origin of values given on the command line
MAX_DEPTH = 50  # of nested mappings and lists
MAX_VALUES = 20_000  # keys and values in a file, with aliases expanded
MAX_BYTES = 2**20  # of a file
MAX_DIGITS, MAX_HEX_DIGITS = 308, 255  # of an integer: larger ones do not fit in a float
_TOO_DEEP = f"more than {MAX_DEPTH} levels of nested mappings and lists"
_ESCAPES = (
    r'between double quotes a backslash begins an escape: write it twice, "\\d", '
    r"or use single quotes: '\d'"
)
_QUOTED = "quote ${...} inside { } and [ ]"
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

    def origin_of(self, path: KeyPath) -> str:
        """The origin of `path`, or of the nearest enclosing section that has one."""
        names = (path_text(path[:end]) for end in range(len(path), 0, -1))
        return next((self.origins[name] for name in names if name in self.origins), DEFAULT)


def child(path: str, key: str | int) -> str:
    """The path of entry `key` below `path`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def path_text(path: KeyPath) -> str:
    """`("data", "train", 0)` as "data.train[0]"."""
    out = ""
    for key in path:
        out = child(out, key)
    return out


def parse_path(text: str) -> KeyPath:
    """Split `data.train.0.size` or `data.train[0].size` into keys; empty if it is not a valid path."""
    dotted = re.sub(r"\[(\d+)\]", r".\1", text)
    parts = dotted.split(".")
    if not all(parts) or re.search(r"[\s\[\]{}]", dotted):
        return ()
    return tuple(int(part) if part.isdecimal() and i else part for i, part in enumerate(parts))


def is_within(path: str, section: str) -> bool:
    """Whether a key is `section` itself or below it."""
    return path.startswith(section) and path[len(section) : len(section) + 1] in ("", ".", "[")


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


def map_values(data: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Replace each value in mappings and lists by `change(key path, value)`."""
    if isinstance(data, dict):
        return {key: map_values(item, change, child(path, key)) for key, item in data.items()}
    if isinstance(data, list | tuple):
        return [map_values(item, change, child(path, i)) for i, item in enumerate(data)]
    return change(path, data)


def place(tree: dict[str, Any], path: KeyPath, value: Any) -> str | None:
    """Set `value` at `path`, creating mappings and lists as needed. Returns an error message on failure."""
    at: Any = tree
    for i, key in enumerate(path):
        is_last = i == len(path) - 1
        below: Any = value if is_last else ([] if isinstance(path[i + 1], int) else {})
        if isinstance(at, dict):
            key = str(key)
            at.setdefault(key)
        elif isinstance(at, list) and isinstance(key, int) and key <= len(at):
            at += [None] * (key == len(at))
        elif isinstance(at, list):
            return (
                f"{path_text(path[:i])} is a list of length {len(at)}; {key!r} is not an index from 0 to "
                f"{len(at)}"
            )
        else:
            return f"{path_text(path[:i])} is {at!r}, which has no keys"
        if is_last or at[key] is None:
            at[key] = below
        at = at[key]
    return None


def read_file(path: Path) -> Written:
    """Read the mapping in a YAML file. Raises ConfigError if the file cannot be read or is not valid YAML;
    duplicate keys and unusable values are collected in `problems`."""
    text = text_of(path)
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise _syntax_error(error, path.name, text) from None
    except RecursionError:
        raise _error(_TOO_DEEP, path.name) from None
    except ValueError as error:  # raised by PyYAML for invalid characters
        raise _error(f"not valid YAML: {error}", path.name) from None
    if isinstance(root, yaml.ScalarNode) and not root.value:  # a document without contents
        root = None
    if root is not None and not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise _error(f"the file contains {kind}; a config must be a mapping", f"{path.name}:1")
    written = Written()
    if root is not None:
        written.tree = _Builder(path.name, written).value(root, "", ())
    return written


def apply_override(written: Written, text: str, kinds: Mapping[str, str | None] | None = None) -> None:
    """Set one value from `key=value`. The value is YAML; nothing after the `=` is the empty text. A mapping
    or list replaces the previous value; an index one past the end of a list appends.

    `kinds` are the keys that hold a kind by its name, or a mapping with its name and settings -> the default
    kind, None if there is none. Settings are added to a name, and the name of the same kind keeps them.
    """
    key, equals, value = text.partition("=")
    path = parse_path(key.strip())
    name, problem = path_text(path), None
    if not equals or not path:
        hint = "; only one config file is allowed" if text.endswith((".yaml", ".yml")) else ""
        problem = f"{text!r} is not an override; write key=value, for example run.seed=1{hint}"
        name = ROOT
    else:
        try:
            parsed = _parse_value(value, written, name)
            path = _within_kind(written, path, parsed, kinds or {})
            problem = place(written.tree, path, parsed)
        except RecursionError:
            problem = _TOO_DEEP
        except yaml.YAMLError as error:
            why = getattr(error, "problem", None) or "not valid YAML"
            fix = f"quote strings: '{key}=\"...\"'"
            if "escape character" in why:
                fix = _ESCAPES
            elif "${" in value and value[0] in "{[":
                fix = _QUOTED
            problem = f"cannot parse the value {value} ({why}); {fix}"
    if problem:
        written.problems.append(Problem(name, problem, OVERRIDE))
        return
    for stale in [known for known in written.origins if is_within(known, name)]:
        del written.origins[stale]
    for i in range(1, len(path) + 1):
        written.origins.setdefault(path_text(path[:i]), OVERRIDE)


def _within_kind(written: Written, path: KeyPath, value: Any, kinds: Mapping[str, str | None]) -> KeyPath:
    """Where to set `value`, after a name above `path` has become a mapping that can have settings."""
    at: Any = written.tree
    for end, key in enumerate(path, 1):
        if not isinstance(at, dict) or key not in at:
            break
        name, held = path_text(path[:end]), at[key]
        if name in kinds and isinstance(held, str) and end < len(path):
            at[key] = {"kind": held}
        elif name in kinds and isinstance(held, dict) and end == len(path):
            origins = {
                where for near, where in written.origins.items() if is_within(near, name) and near != name
            }
            is_meant = "kind" not in held and origins == {OVERRIDE}  # the name follows its settings
            return (*path, "kind") if is_meant or held.get("kind", kinds[name]) == value else path
        at = at[key]
    return path


def _parse_value(text: str, written: Written, name: str) -> Any:
    if not text:
        return ""
    node = yaml.compose(text, Loader=yaml.BaseLoader)
    if node is None:
        return plain_scalar(text.strip())
    return _Builder(OVERRIDE, written).value(node, name, ())


def plain_scalar(text: str) -> Any:
    """Parse an unquoted YAML scalar: null, a boolean, a number, or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text) and len(text) <= _max_digits(text):  # longer ones are rejected in files
        return int(text.replace("_", ""), 0 if text[:2] in ("0x", "0o") else 10)
    if _FLOAT.fullmatch(text) and not _INT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def _max_digits(integer: str) -> int:
    return MAX_HEX_DIGITS if integer.startswith("0x") else MAX_DIGITS


_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_TEXT = "tag:yaml.org,2002:str"
_TAGS = (_TEXT, "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


class _Builder:
    """Converts YAML nodes to plain data; origins and problems are added to `written`."""

    def __init__(self, file: str, written: Written) -> None:
        self._file = file
        self._written = written
        self._num_values = 0

    def value(
        self, node: yaml.Node, path: str, parents: tuple[yaml.Node, ...], at: yaml.Node | None = None
    ) -> Any:
        """Convert `node`, which is at key `path` below `parents`. Its origin is the line of `at`, or its
        own."""
        if path:
            self._written.origins[path] = self._where(at or node)
        self._count(node, path)
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None and node.tag == _TEXT
        if node in parents:
            problem = "an alias (*name) must not refer to a node that contains it; remove it"
        elif node.tag not in _TAGS:
            problem = f"the YAML tag {node.tag!r} is not supported; remove it"
        elif len(parents) == MAX_DEPTH:
            problem = _TOO_DEEP
        elif is_plain and len(node.value) > (most := _max_digits(node.value)) and _INT.fullmatch(node.value):
            problem = f"an integer of {len(node.value):,} digits; at most {most} are allowed"
        else:
            parents = (*parents, node)
            if isinstance(node, yaml.MappingNode):
                pairs = self._pairs(node, path, parents).items()
                return {
                    name: self.value(item, child(path, name), parents, key) for name, (key, item) in pairs
                }
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, child(path, i), parents) for i, item in enumerate(node.value)]
            return plain_scalar(node.value) if is_plain else node.value
        self._problem(path, node, problem)
        return None

    def _pairs(
        self, node: yaml.MappingNode, path: str, parents: tuple[yaml.Node, ...]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key -> (key node, value node). The mapping's own keys override those merged by `<<`, and earlier
        merged mappings override later ones."""
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        direct: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, item in node.value:
            self._count(key, path)
            if not isinstance(key, yaml.ScalarNode):
                self._problem(path, key, "a key must be a plain scalar")
            elif key.value == "<<" and key.style is None:
                for source in item.value if isinstance(item, yaml.SequenceNode) else [item]:
                    if isinstance(source, yaml.MappingNode) and source not in parents:
                        merged = self._pairs(source, path, (*parents, source)) | merged
                    else:
                        needs = "a mapping, or a list of mappings, that does not contain it"
                        self._problem(path, key, f"<< needs {needs}")
            elif key.value in direct:
                first = self._where(direct[key.value][0])
                self._problem(child(path, key.value), key, f"duplicate key, first set at {first}; remove one")
            else:
                direct[key.value] = (key, item)
        return merged | direct

    def _count(self, node: yaml.Node, path: str) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            message = f"more than {MAX_VALUES:,} keys and values after expanding aliases (*name)"
            raise ConfigError([Problem(path or ROOT, message, self._where(node))])

    def _where(self, node: yaml.Node) -> str:
        return OVERRIDE if self._file == OVERRIDE else f"{self._file}:{node.start_mark.line + 1}"

    def _problem(self, path: str, node: yaml.Node, message: str) -> None:
        self._written.problems.append(Problem(path or ROOT, message, self._where(node)))


def text_of(path: Path) -> str:
    """The text of a config file. Raises ConfigError if it cannot be read."""
    here = "command line"
    if isdir(path):
        names = sorted(p.name for p in path.glob("*.y*ml"))
        have = f", such as {', '.join(names[:5])}" if names else ""
        raise _error(f"{path} is a folder; pass a .yaml file{have}", here)
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise _error(f"the file has {size:,} bytes; at most {MAX_BYTES:,} are allowed", path.name)
        return path.read_text("utf-8")
    except FileNotFoundError:
        near = suggest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        raise _error(f"no such file: {path}{near}", here) from None
    except UnicodeDecodeError as error:
        raise _error(f"the file is not UTF-8 text ({error.reason})", path.name) from None
    except OSError as error:
        raise _error(f"cannot read {path}: {error.strerror}", here) from None


def _syntax_error(error: yaml.YAMLError, file: str, text: str) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    message = f"not valid YAML: {what}" + (f" ({context})" if context else "")
    line = "".join(text.splitlines()[mark.line : mark.line + 1]) if mark else ""
    if "escape character" in message:
        message += f"; {_ESCAPES}"
    elif "'\\t'" in message:
        message += "; indent YAML with spaces, not tabs"
    elif "but found another document" in message:
        message += "; a config is a single document, remove the line ---"
    elif "${" in line and "flow" in message:
        message += f"; {_QUOTED}"
    return _error(message, f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file)


def _error(message: str, origin: str) -> ConfigError:
    return ConfigError([Problem(ROOT, message, origin)])
