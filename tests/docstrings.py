"""The docstrings of Python code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")


def docstrings(block: ast.AST) -> Iterator[ast.Constant]:
    """The docstrings in a module, with those of its constants and fields."""
    for part in STATEMENTS:
        for statement in getattr(block, part, ()):
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    yield text
                case ast.Expr():
                    pass
                case _:
                    yield from docstrings(statement)
