"""Describes the schema's fields, as types and in words.

Loading, the reference page and the command line all use this module, so that error messages and the reference
agree on the allowed values.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at
from pydantic.fields import FieldInfo

from .base import Section


@dataclass(frozen=True, slots=True)
class Shape:
    """Type of a field. `sections` are the section classes it may contain, directly or as a list (`is_list`);
    none for plain values. Several are distinguished by their key `kind`. `is_nullable`: null is allowed."""

    sections: tuple[type[Section], ...]
    is_list: bool
    is_nullable: bool

    def section_for(self, value: Any) -> type[Section] | None:
        """The section class of `value`: the only one, or the one named by its `kind`; None if unknown."""
        if len(self.sections) == 1:
            return self.sections[0]
        kind = value.get("kind") if isinstance(value, dict) else None
        return next((s for s in self.sections if kind_of(s) == kind), None)


def shape_of(field: FieldInfo) -> Shape:
    """The shape of a schema field."""
    members, is_nullable = _members(field.annotation)
    is_list = len(members) == 1 and get_origin(members[0]) is tuple
    if is_list:
        members, _ = _members(get_args(members[0])[0])
    sections = tuple(m for m in members if isinstance(m, type) and issubclass(m, Section))
    return Shape(sections, is_list and bool(sections), is_nullable)


def kind_of(section: type[Section]) -> str | None:
    """The value of the section's key `kind`; None if it has no such key."""
    field = section.model_fields.get("kind")
    return None if field is None else get_args(field.annotation)[0]


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(key path, field) of every field below `section`, in order; list items as `key[]`. A union field is
    listed once, followed by the fields of each kind."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        shape = shape_of(field)
        for member in shape.sections:
            yield from fields_of(member, f"{prefix}{name}{'[]' if shape.is_list else ''}.")


def allowed(field: FieldInfo) -> str:
    """The allowed values of a field in words: "an integer > 0, or null"."""
    return _words(field.annotation, field.metadata)


def allowed_item(field: FieldInfo) -> str:
    """The allowed values of an item of a list field, in words."""
    members, _ = _members(field.annotation)
    lists = [m for m in members if get_origin(m) is tuple]
    return _words(get_args(lists[0])[0], []) if lists else allowed(field)


_PLAIN = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a mapping",
    types.NoneType: "null",
}


def _members(annotation: Any) -> tuple[list[Any], bool]:
    """The members of a union except null, and whether null is a member."""
    if get_origin(annotation) is Annotated:
        inner = get_args(annotation)[0]
        if get_origin(inner) in (Union, types.UnionType):
            return _members(inner)
        return [annotation], False
    if get_origin(annotation) in (Union, types.UnionType):
        found = [_members(a) for a in get_args(annotation)]
        members = [m for members, _ in found for m in members if m is not types.NoneType]
        return members, any(m is types.NoneType for members, _ in found for m in members) or any(
            n for _, n in found
        )
    return [annotation], annotation is types.NoneType


def _words(annotation: Any, metadata: list[Any]) -> str:
    members, is_nullable = _members(annotation)
    kinds = [kind_of(m) for m in members if isinstance(m, type) and issubclass(m, Section)]
    if len(kinds) > 1:
        parts = ["a mapping whose `kind` is one of " + ", ".join(str(k) for k in kinds)]
    else:
        parts = [_member_words(m, metadata) for m in members if m is not types.NoneType]
    return ", or ".join(dict.fromkeys(parts + ["null"] * is_nullable))


def _member_words(member: Any, metadata: list[Any]) -> str:
    if get_origin(member) is Annotated:
        inner, *extra = get_args(member)
        own = [rule for e in extra for rule in (e.metadata if isinstance(e, FieldInfo) else [e])]
        return _member_words(inner, [*own, *metadata])
    if get_origin(member) is Literal:
        choices: tuple[Any, ...] = get_args(member)
        return f"one of {', '.join(map(str, choices))}" if len(choices) > 1 else repr(*choices)
    if get_origin(member) is tuple:
        items = get_args(member)
        if items[-1] is Ellipsis:
            return f"a list, each {_words(items[0], [])}"
        return f"a list of {len(items)}, each {_words(items[0], [])}"
    if isinstance(member, type) and issubclass(member, Section):
        return "a mapping with keys " + ", ".join(member.model_fields)
    return _PLAIN[get_origin(member) or member] + _range_words(metadata)


def _range_words(metadata: list[Any]) -> str:
    bounds = []
    for rule in metadata:
        match rule:
            case at.Gt(gt=bound):
                bounds.append(f"> {bound:g}")
            case at.Ge(ge=bound):
                bounds.append(f">= {bound:g}")
            case at.Lt(lt=bound):
                bounds.append(f"< {bound:g}")
            case at.Le(le=bound):
                bounds.append(f"<= {bound:g}")
            case _ if pattern := getattr(rule, "pattern", None):
                bounds.append(f"matching {pattern}")
            case _:
                pass
    return " " + " and ".join(bounds) if bounds else ""
