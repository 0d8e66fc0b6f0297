"""Looking up values in a data row by a configured path."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


class NoColumn(LookupError):
    """`inside` (the path so far; empty for the row itself) has no item `name`; `present` lists its items."""

    def __init__(self, name: str, inside: str, present: Iterable[object]) -> None:
        super().__init__(name)
        self.name, self.inside = name, inside
        self.present = [str(key) for key in present]


def find(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of column `path`, or the nested value at `a.b`: item `b` of column `a`, which is a
    mapping (by key), a list (by index) or JSON text. Raises NoColumn."""
    if path in row:
        return row[path]
    value: Any = row
    inside = ""
    for name in path.split("."):
        value = _item(value, name, inside)
        inside = f"{inside}.{name}" if inside else name
    return value


def parse_json(text: str) -> Any:
    """Parse `text` as a JSON list or object; None if it is neither."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _item(value: Any, name: str, inside: str) -> Any:
    if isinstance(value, str):
        value = parse_json(value)
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        raise NoColumn(name, inside, value)
    if isinstance(value, list):
        if name.isdecimal() and int(name) < len(value):
            return value[int(name)]
        raise NoColumn(name, inside, range(len(value)))
    raise NoColumn(name, inside, ())
