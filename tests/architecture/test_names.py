"""Locals and parameters are named for what they hold (none is called `of`, `own`, `found`, `given`, `told` or
`seen`), and docstrings say something."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
NAMES = {"of", "own", "found", "given", "told", "seen"}

LEFT = {
    "braid/trainer": 46,
}
"""Packages and files that still have such names -> how many. Numbers here only fall; what has none left is
removed."""

EMPTY = re.compile(r"(See [\w.`]+( for the contract)?|Those of [^.]*)\.")
"""A docstring that only points elsewhere."""

LEFT_EMPTY = {
    "braid/trainer": 16,
}
"""The same for such docstrings."""


def _bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each binding of a variable, parameter or field."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case (
                ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name))
            ):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield node.lineno, name


def _vague_names(tree: ast.AST) -> list[tuple[int, str]]:
    return sorted((line, name) for line, name in _bound(tree) if name in NAMES)


def _empty_docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        (getattr(node, "lineno", 1), " ".join((ast.get_docstring(node) or "").split()))
        for node in ast.walk(tree)
        if isinstance(node, documented)
    ]
    return [(line, text) for line, text in texts if EMPTY.fullmatch(text)]


def _check(rule: Callable[[ast.AST], list[tuple[int, str]]], left: Mapping[str, int], fix: str) -> None:
    """All files follow the rule, but for the numbers in `left`."""
    faults: list[str] = []
    counts = Counter[str]()
    for path in sorted(SRC.rglob("*.py")):
        file = path.relative_to(SRC).as_posix()
        broken = rule(ast.parse(path.read_text()))
        entry = next((entry for entry in left if file == entry or file.startswith(f"{entry}/")), None)
        if entry is not None:
            counts[entry] += len(broken)
        else:
            faults += [f"src/{file}:{line}: {text}" for line, text in broken]
    assert not faults, f"{fix}:\n" + "\n".join(faults)
    grown = {entry: counts[entry] for entry, limit in left.items() if counts[entry] > limit}
    assert not grown, f"more than the list has: {grown}; {fix}"
    clean = [entry for entry in left if not counts[entry]]
    assert not clean, f"nothing is left here, so remove them from the list: {clean}"


def test_every_way_to_bind_a_name_is_seen() -> None:
    code = """
def f(of, *own, given=0, **told):
    found = [seen for seen in own]
    for of, (own, _) in (): pass
    with a as given: pass
    if (told := f): pass
    lambda seen: seen
    match f:
        case {"x": found, **own}: pass
        case [of, *given]: pass
        case told: pass
    try: pass
    except E as seen: pass
    import a as found
"""
    names = Counter(name for _, name in _vague_names(ast.parse(code)))
    assert names == {"of": 3, "own": 3, "given": 3, "told": 3, "seen": 3, "found": 3}


def test_names_say_what_they_hold() -> None:
    _check(_vague_names, LEFT, "name these for what they hold")


def test_docstrings_say_something() -> None:
    _check(_empty_docstrings, LEFT_EMPTY, "say what these do, or remove the docstring of what is private")
