"""Locals and parameters are named for what they hold (none is called `of`, `own`, `found`, `given`, `told` or
`seen`), and docstrings say something."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from symtable import SymbolTable, symtable

from tests.docstrings import docstrings

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
NAMES = {"of", "own", "found", "given", "told", "seen"}
EMPTY = re.compile(r"(See [\w.`]+( for the contract)?|Those of [^.]*)\.")
"""A docstring that only points elsewhere."""


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


def _vague_names(code: str) -> list[tuple[int, str]]:
    if not _tables_have_names(symtable(code, "", "exec")):
        return []
    return sorted((line, name) for line, name in _bound(ast.parse(code)) if name in NAMES)


def _tables_have_names(table: SymbolTable) -> bool:
    """Whether a scope of the table knows one of NAMES; much faster than to walk over the tree."""
    return not NAMES.isdisjoint(table.get_identifiers()) or any(map(_tables_have_names, table.get_children()))


def _empty_docstrings(code: str) -> list[tuple[int, str]]:
    texts = ((node.lineno, " ".join(node.value.split())) for node in docstrings(ast.parse(code)))
    return [(line, text) for line, text in texts if EMPTY.fullmatch(text)]


def _check(rule: Callable[[str], list[tuple[int, str]]], fix: str) -> None:
    """All files follow the rule."""
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {text}" for path in FILES for line, text in rule(path.read_text())
    ]
    assert not faults, f"{fix}:\n" + "\n".join(faults)


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
    names = Counter(name for _, name in _vague_names(code))
    assert names == {"of": 3, "own": 3, "given": 3, "told": 3, "seen": 3, "found": 3}


def test_names_say_what_they_hold() -> None:
    _check(_vague_names, "name these for what they hold")


def test_docstrings_say_something() -> None:
    _check(_empty_docstrings, "say what these do, or remove the docstring of what is private")
