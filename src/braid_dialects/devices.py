"""ROLL's device mappings: Python expressions of lists, ranges, and their sums, parsed but never evaluated."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .values import Takes, takes

GRAMMAR = "write list(range(0,8)), range(8), [0,1,2], or a sum of them"
MAX_DEVICES = 65_536
"""Maximum number of devices in a mapping."""
_MAX_TEXT = 1000
"""Maximum number of characters in a mapping."""
DEVICES = Takes(f"a device mapping: {GRAMMAR}", takes("text or [int]").accepts)


def parse_devices(mapping: str | Sequence[int]) -> tuple[int, ...]:
    """Return the device indices of a mapping, in its order.

    Raises ValueError for syntax errors, an empty mapping, negative indices, and duplicates.
    """
    wrong = ""
    try:
        devices = _parsed(mapping) if isinstance(mapping, str) else tuple(mapping)
        if not devices:
            wrong = "it contains no device"
        elif min(devices) < 0:
            wrong = "device numbers start at 0"
        elif len(set(devices)) < len(devices):
            wrong = "a device appears twice"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        devices, wrong = (), str(error) if isinstance(error, ValueError) else "invalid device mapping"
    if wrong:
        shown = text if len(text := str(mapping)) <= 60 else text[:57] + "..."
        raise ValueError(f"{shown!r}: {wrong}; {GRAMMAR}")
    return devices


def _parsed(text: str) -> tuple[int, ...]:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"more than {_MAX_TEXT} characters")
    return _devices(ast.parse(text.strip(), mode="eval").body)


def _devices(node: ast.expr) -> tuple[int, ...]:
    match node:
        case ast.List(items):
            return tuple(map(_number, items))
        case ast.BinOp(left, ast.Add(), right):
            return _devices(left) + _devices(right)
        case ast.Call(ast.Name("list"), [inner], []):
            return _devices(inner)
        case ast.Call(ast.Name("range"), [_, *_] as limits, []) if len(limits) <= 3:
            devices = range(*map(_number, limits))
            if len(devices) > MAX_DEVICES:
                raise ValueError(f"more than {MAX_DEVICES} devices")
            return tuple(devices)
    raise SyntaxError


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(number) if type(number) is int:
            return number
        case ast.UnaryOp(ast.USub(), operand):
            return -_number(operand)
    raise SyntaxError
