"""Parsing JSON that braid did not write: a model's answers, servers' replies, files of users and of other
programs.

Unlike `json.loads`, every defect is a ValueError, and the depth is limited to a constant: what Python accepts
depends on the caller's stack, and what is barely accepted fails later, when it is copied, printed or written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_DEPTH = 128
"""Levels of nested lists and objects, as in serde_json, which reads tokenizers and weight files."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text; bytes are UTF-8, UTF-16 or UTF-32. Raises ValueError with the rule that the text
    breaks."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_DEPTH and isinstance(value, list | dict) and _is_too_deep(value):  # pyright: ignore[reportArgumentType]
        raise _too_deep()
    return value


def read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises OSError, or ValueError, whose message lacks the file's name."""
    value = parse_json(file.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"it contains a JSON {json_type(value)}, but must be an object")
    return value


def json_type(value: Any) -> str:
    """The name of a parsed value's type in JSON."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _too_deep() -> ValueError:
    return ValueError(f"more than {MAX_DEPTH} levels of nested lists and objects")


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        items = (nested.values() if isinstance(nested, dict) else nested for nested in level)
        level = [item for inside in items for item in inside if isinstance(item, list | dict)]
    return bool(level)
