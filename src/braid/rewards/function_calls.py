"""Tests that call a function of the program with JSON values: rows of LiveCodeBench, DeepCoder, TACO and
APPS.

A call becomes the two texts that programs.py runs in separate sandboxes: an entry point, added to the
program, and an assertion, which compares the result where the expected value is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from braid.json_text import parse_json

_NAME = re.compile(r"(?:Solution(?:\(\))?\.)?([^\W\d]\w*)")
_STDIN, _CALLS = frozenset({"stdin", "stdin_stdout", "stdio"}), frozenset({"functional", "function_call"})

_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator "
    "io sys json builtins typing"
)
PRELUDE = "\n".join(
    [
        *(f"from {name} import *" for name in _MODULES.split()),
        *(f"import {name}" for name in _MODULES.split()),
        "sys.setrecursionlimit(50_000)",
    ]
)
"""Names that starter codes and their solutions use without an import, such as `List`; as in LiveCodeBench."""
ENTRY = "braid_entry"


def called_function(test: Mapping[str, Any], metadata: Any = None) -> str | None:
    """Name of the function that a test calls; None if the test is a program's input and output. `metadata` is
    that of the row, for LiveCodeBench. Raises ValueError if the name is missing or the kind of test
    unknown."""
    kind = test.get("testtype") or test.get("type")
    if kind is not None and kind not in _STDIN | _CALLS:
        known = ", ".join(sorted(_STDIN | _CALLS))
        raise ValueError(f"tests of the type {str(kind)[:40]!r} are not supported; supported: {known}")
    if kind in _STDIN:
        return None
    metadata = test.get("metadata") or metadata
    if isinstance(metadata, str) and metadata.lstrip().startswith("{"):
        metadata = parse_json(metadata)
    function = test.get("fn_name")
    if kind in _CALLS and not function and isinstance(metadata, dict):
        function = metadata.get("func_name") or metadata.get("fn_name")
    if not function:
        if kind in _CALLS:
            raise ValueError(
                f"a test of the type {kind!r} does not name its function; add 'fn_name' to it, or a column "
                "'metadata' with {func_name}, as in LiveCodeBench"
            )
        return None
    name = _NAME.fullmatch(function) if isinstance(function, str) else None
    if name is None:
        raise ValueError(
            f"{str(function)[:80]!r} cannot be called; fn_name must be the name of a function or method"
        )
    return name[1]


def entry_to(function: str, code: str) -> str:
    """The program with an entry point to its function, a method of its class Solution if that has one."""
    return (
        f"exec({PRELUDE!r})\n"
        f"globals().pop({function!r}, None)\n"  # only the program may define it
        f"exec(compile({code!r}, 'answer.py', 'exec'))\n"
        f"def {ENTRY}(*args, name={function!r}):\n"
        "    solution = globals().get('Solution')\n"
        "    function = getattr(solution(), name) if hasattr(solution, name) else globals()[name]\n"
        "    return function(*args)\n"
    )


def assertion_of(arguments: Any, expected: Any) -> str:
    """Text of a test that calls the entry point. Texts are JSON, of arguments one value a line
    (LiveCodeBench); lists are the arguments, and the expected value may be in a list of its own (TACO, APPS).
    Raises ValueError for others."""
    is_wrapped = isinstance(expected, list) and len(expected) == 1 and not isinstance(arguments, str)
    if isinstance(arguments, str):
        arguments = [_parsed(line, "input") for line in arguments.splitlines() if line.strip()]
        expected = _parsed(expected, "output") if isinstance(expected, str) else expected
    elif not isinstance(arguments, list):
        raise ValueError(
            f"the input {str(arguments)[:80]!r} of a function call is neither a list of arguments nor JSON "
            "text, one argument a line"
        )
    elif (
        len(arguments) == 1 and isinstance(arguments[0], dict) and all(map(_INTEGER.fullmatch, arguments[0]))
    ):
        arguments = [{int(key): value for key, value in arguments[0].items()}]  # JSON made them text
    return _ASSERTION.format(
        arguments=_literal(arguments), expected=_literal(expected), is_wrapped=is_wrapped, entry=ENTRY
    )


_INTEGER = re.compile(r"-?\d+")
_ASSERTION = """
import json, math

def same(value, wanted):
    if isinstance(wanted, list):
        return isinstance(value, (list, tuple)) and len(value) == len(wanted) and all(
            same(one, other) for one, other in zip(value, wanted))
    if isinstance(wanted, dict):
        if not isinstance(value, dict) or len(value) != len(wanted):
            return False
        value = {{key if isinstance(key, str) else json.dumps(key): one for key, one in value.items()}}
        return value.keys() == wanted.keys() and all(same(value[key], wanted[key]) for key in wanted)
    if isinstance(wanted, float) and isinstance(value, (int, float)):
        return value == wanted or math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-6)
    return isinstance(value, (str, int, float, type(None))) and value == wanted

wanted = {expected}
value = {entry}(*{arguments})
assert same(value, wanted) or {is_wrapped} and same(value, wanted[0])
"""


def _parsed(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"the {what} {text[:80]!r} of a function call is not JSON: {error}") from None


def _literal(value: Any) -> str:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(value)[:80]!r} is not a JSON value: {error}") from None
    return f"(lambda nan, inf: {value!r})(float('nan'), float('inf'))"
