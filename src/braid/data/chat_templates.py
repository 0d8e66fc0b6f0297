"""Whether what a chat template writes around the contents of messages depends on these contents.

Most templates write contents as they are, or without white space at their ends, and look for a few texts in
them, such as "</think>". Data of millions of rows can then be checked without rendering each. The analysis
follows the template's syntax tree and gives up at constructs that it does not know, such as the result of a
macro with contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes


class Kind(Enum):
    """What a value in a template may be."""

    OTHER = "nothing that depends on contents"
    MESSAGES = "a list of messages"
    MESSAGE = "a message"
    CONTENT = "a content, perhaps without white space at its ends"
    PARTS = "a list of one content: what `split` gives by a text that is not in it"
    WRITTEN = "a text with contents in it, which may only be written"


_TYPE_TESTS = {
    "string",
    "defined",
    "undefined",
    "none",
    "mapping",
    "sequence",
    "iterable",
    "number",
    "boolean",
}
_OF_LISTS = {
    "length": Kind.OTHER,
    "count": Kind.OTHER,
    "first": Kind.MESSAGE,
    "last": Kind.MESSAGE,
    "list": Kind.MESSAGES,
    "reverse": Kind.MESSAGES,
}
_TEXTS = (Kind.CONTENT, Kind.WRITTEN)


class _UnknownError(Exception):
    """The template may depend on contents in another way."""


@lru_cache(maxsize=8)
def searched_texts(template: str) -> frozenset[str] | None:
    """The texts that a chat template looks for in the contents of messages. Contents that have none of these,
    and more than white space, it writes equally often for equal roles, with the same texts around them. None
    if that is not certain."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    analysis, before = _Analysis(), None
    try:
        tree = environment.parse(template)
        while before != analysis.kinds:
            before = dict(analysis.kinds)
            analysis.statements(tree.body)
    except (_UnknownError, jinja2.TemplateSyntaxError, RecursionError):
        return None
    return frozenset(analysis.texts)


class _Analysis:
    """`kinds` of names hold for the whole template, whatever the order of its statements."""

    def __init__(self) -> None:
        self.kinds = {"messages": Kind.MESSAGES}
        self.texts: set[str] = set()

    def statements(self, body: Iterable[Any], *, is_captured: bool = False) -> None:
        """Follow statements; those whose output is captured must not write contents, as it can be looked
        at."""
        for node in body:
            match node:
                case nodes.Output():
                    kinds = set(map(self.kind, node.nodes)) - {Kind.OTHER}
                    if not kinds <= set(() if is_captured else _TEXTS):
                        raise _UnknownError
                case nodes.If():
                    self.test(node.test)
                    self.statements([*node.body, *node.elif_, *node.else_], is_captured=is_captured)
                case nodes.For():
                    kind = self.kind(node.iter)
                    if kind not in (Kind.OTHER, Kind.MESSAGES):
                        raise _UnknownError
                    self.assign(node.target, Kind.MESSAGE if kind is Kind.MESSAGES else Kind.OTHER)
                    if node.test is not None:
                        self.test(node.test)
                    self.statements([*node.body, *node.else_], is_captured=is_captured)
                case nodes.Assign():
                    self.assign(node.target, self.kind(node.node))
                case nodes.Macro():
                    self.others(node.defaults)
                    self.statements(node.body, is_captured=True)
                case nodes.AssignBlock(filter=None):
                    self.statements(node.body, is_captured=True)
                case nodes.Break() | nodes.Continue():
                    pass
                case _:
                    raise _UnknownError

    def assign(self, target: Any, kind: Kind) -> None:
        """Give a name another kind that it may have."""
        if isinstance(target, nodes.Name):
            self.kinds[target.name] = _either(self.kinds.get(target.name, Kind.OTHER), kind)
        elif kind is not Kind.OTHER:  # an attribute of a namespace, or several names
            raise _UnknownError
        elif isinstance(target, nodes.Tuple):
            for item in target.items:
                self.assign(item, kind)

    def test(self, node: Any) -> Kind:
        """The kind of a value whose truth is used: contents with more than white space are true."""
        kind = self.kind(node)
        if kind is Kind.WRITTEN:
            raise _UnknownError
        return kind

    def others(self, values: Iterable[Any]) -> Kind:
        """OTHER, if all values are."""
        if any(self.kind(value) is not Kind.OTHER for value in values):
            raise _UnknownError
        return Kind.OTHER

    def kind(self, node: Any) -> Kind:
        """The kind of an expression."""
        match node:
            case nodes.Name(name="loop"):  # has messages in it
                raise _UnknownError
            case nodes.Name():
                return self.kinds.get(node.name, Kind.OTHER)
            case nodes.TemplateData() | nodes.Const():
                return Kind.OTHER
            case nodes.Getattr(node=nodes.Name(name="loop")):
                return Kind.MESSAGE if node.attr in ("previtem", "nextitem") else Kind.OTHER
            case nodes.Getattr():
                return _item(self.kind(node.node), node.attr)
            case nodes.Getitem():
                return self._getitem(node)
            case nodes.Call():
                return self._call(node)
            case nodes.Filter():
                return self._filter(node)
            case nodes.Slice():
                return self.others(part for part in (node.start, node.stop, node.step) if part is not None)
            case nodes.List() | nodes.Tuple() | nodes.Dict():
                return self.others(_inside(node))
            case _:
                return self._operator(node)

    def _operator(self, node: Any) -> Kind:
        match node:
            case nodes.Test():
                if node.name not in _TYPE_TESTS or self.kind(node.node) is Kind.OTHER:
                    return self.others([node.node, *node.args, *_values(node)])
                return Kind.OTHER
            case nodes.Compare(ops=[operand]):
                return self._compare(node.expr, operand.op, operand.expr)
            case nodes.Not():
                self.test(node.node)
                return Kind.OTHER
            case nodes.And() | nodes.Or():
                return _either(self.test(node.left), self.kind(node.right))
            case nodes.CondExpr():
                self.test(node.test)
                otherwise = Kind.OTHER if node.expr2 is None else self.kind(node.expr2)
                return _either(self.kind(node.expr1), otherwise)
            case nodes.Add():
                return self._joined([node.left, node.right])
            case nodes.Concat():
                return self._joined(node.nodes)
            case nodes.BinExpr() | nodes.UnaryExpr() | nodes.Compare():
                return self.others(_inside(node))
            case _:
                raise _UnknownError

    def _joined(self, values: Iterable[Any]) -> Kind:
        kinds = set(map(self.kind, values))
        if kinds == {Kind.OTHER}:
            return Kind.OTHER
        if kinds <= {Kind.OTHER, *_TEXTS}:  # what is looked for may lie across the ends of a content
            return Kind.WRITTEN
        raise _UnknownError

    def _getitem(self, node: nodes.Getitem) -> Kind:
        kind = self.kind(node.node)
        self.others([node.arg])
        if kind is Kind.MESSAGES:
            return Kind.MESSAGES if isinstance(node.arg, nodes.Slice) else Kind.MESSAGE
        if kind is Kind.OTHER:
            return Kind.OTHER
        key = _constant(node.arg)
        if kind is Kind.PARTS and key in (0, -1):
            return Kind.CONTENT
        return _item(kind, key)

    def _call(self, node: nodes.Call) -> Kind:
        args = [*node.args, *_values(node)]
        if isinstance(node.node, nodes.Getattr) and node.dyn_args is node.dyn_kwargs is None:
            kind, method = self.kind(node.node.node), node.node.attr
            match method, list(map(_constant, args)):
                case "get", [str(key), *_] if kind is Kind.MESSAGE:
                    self.others(args)
                    return _item(kind, key)
                case "startswith" | "endswith", [str(text)] if kind is Kind.CONTENT:
                    return self._looks_for(text)
                case "split", [str(text)] if kind is Kind.CONTENT:
                    self._looks_for(text)
                    return Kind.PARTS
                case "strip" | "lstrip" | "rstrip", ([] | [str()]) as cut if kind in _TEXTS:
                    return kind if not "".join(cut).strip() else Kind.WRITTEN
                case _:
                    pass
        return self.others([node.node, *args, *filter(None, (node.dyn_args, node.dyn_kwargs))])

    def _filter(self, node: nodes.Filter) -> Kind:
        kind = Kind.OTHER if node.node is None else self.kind(node.node)
        args = [*node.args, *_values(node)]
        match kind, node.name:
            case Kind.CONTENT | Kind.WRITTEN, "trim" | "string" if not args:
                return kind
            case Kind.MESSAGES, name if name in _OF_LISTS and not args:
                return _OF_LISTS[name]
            case Kind.MESSAGES, "selectattr" | "rejectattr" if args and _constant(args[0]) == "role":
                self.others(args)
                return Kind.MESSAGES
            case Kind.OTHER, _ if node.node is not None:
                return self.others([*args, *filter(None, (node.dyn_args, node.dyn_kwargs))])
            case _:
                raise _UnknownError

    def _compare(self, left: Any, operator: str, right: Any) -> Kind:
        kinds = self.kind(left), self.kind(right)
        match kinds, operator:
            case (Kind.OTHER, Kind.OTHER), _:
                return Kind.OTHER
            case (Kind.CONTENT, Kind.OTHER) | (Kind.OTHER, Kind.CONTENT), "eq" | "ne":
                value = _constant(right if kinds[1] is Kind.OTHER else left)
                is_text = isinstance(value, str) and value.strip()  # contents are no other values
                if value is not _NO_CONSTANT:
                    return self._looks_for(value) if is_text else Kind.OTHER
            case (Kind.OTHER, Kind.CONTENT), "in" | "notin" if isinstance(value := _constant(left), str):
                return self._looks_for(value)
            case (Kind.OTHER, Kind.MESSAGE), "in" | "notin":
                return Kind.OTHER
            case _:
                pass
        raise _UnknownError

    def _looks_for(self, text: str) -> Kind:
        if not text:
            raise _UnknownError
        self.texts.add(text)
        return Kind.OTHER


def _item(kind: Kind, key: Any) -> Kind:
    """The kind of an item or attribute of a value."""
    if kind is Kind.OTHER:
        return Kind.OTHER
    if kind is not Kind.MESSAGE or not isinstance(key, str) or hasattr(dict, key):
        raise _UnknownError
    return Kind.CONTENT if key == "content" else Kind.OTHER


_NO_CONSTANT = object()


def _constant(node: Any) -> Any:
    """The value of a constant; `_NO_CONSTANT` for other expressions."""
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const):
        return -node.node.value
    return node.value if isinstance(node, nodes.Const) else _NO_CONSTANT


def _values(node: Any) -> list[Any]:
    """The values of keyword arguments."""
    return [pair.value for pair in node.kwargs]


def _inside(node: nodes.Node) -> list[Any]:
    """The expressions in a node."""
    expressions = []
    for child in node.iter_child_nodes():
        expressions += _inside(child) if isinstance(child, (nodes.Operand, nodes.Pair)) else [child]
    return expressions


def _either(one: Kind, other: Kind) -> Kind:
    """The kind of a value that has one of two kinds. A value of kind OTHER meets what holds for each kind."""
    kinds = {one, other} - {Kind.OTHER}
    if len(kinds) < 2:
        return kinds.pop() if kinds else Kind.OTHER
    if kinds == set(_TEXTS):
        return Kind.WRITTEN
    raise _UnknownError
