"""Looking up values in a data row by a configured path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from braid import json_text
from braid.errors import suggest


def find(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of column `path`, or the nested value at `a.b`: item `b` of column `a`, which is a
    mapping (by key), a list (by index) or JSON text. Raises LookupError, which lists the columns that are
    there."""
    if path in row:
        return row[path]
    value: Any = row
    names = path.split(".")
    for i, name in enumerate(names):
        if isinstance(value, str):
            value = parse_json(value)
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        present: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        if name not in present:
            inside = f" inside {'.'.join(names[:i])!r}" if i else ""
            has = f"the columns{inside} are {', '.join(map(str, present))}"
            has = has if present else f"there are no columns{inside}"
            raise LookupError(f"no column {name!r}{inside}{suggest(name, map(str, present))}; {has}")
        value = present[name]
    return value


def parse_json(text: str) -> Any:
    """Parse `text` as a JSON list or object; None if it is neither."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json_text.parse_json(text)
    except ValueError:
        return None
