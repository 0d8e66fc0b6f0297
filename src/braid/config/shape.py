"""Describes the schema's fields, as section classes and in words, for error messages and the reference."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from braid.sections import Section


def sections_of(field: FieldInfo) -> tuple[type[Section], ...]:
    """The section classes that a field may contain, directly or as a list; none for plain values. Several are
    distinguished by their key `kind`."""
    return tuple(_sections_in(field.annotation))


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in(inner)


def section_for(value: Any, sections: tuple[type[Section], ...]) -> type[Section] | None:
    """The one of `sections` that describes `value`: the only one, or the one named by its `kind`."""
    if len(sections) == 1:
        return sections[0]
    kind = value.get("kind") if isinstance(value, dict) else None
    return next((section for section in sections if kind_of(section) == kind), None)


def kind_of(section: type[Section]) -> str | None:
    """The value of the section's key `kind`; None if it has no such key."""
    field = section.model_fields.get("kind")
    return None if field is None else get_args(field.annotation)[0]


def is_list(field: FieldInfo) -> bool:
    """Whether a field takes a list of sections or values."""
    return any(get_origin(member) is tuple for member in (field.annotation, *get_args(field.annotation)))


@cache
def fields_of(section: type[Section], prefix: str = "") -> tuple[tuple[str, FieldInfo], ...]:
    """(key path, field) of every field below `section`, in order; list items as `key[]`. A union field is
    listed once, followed by the fields of each kind."""
    fields: list[tuple[str, FieldInfo]] = []
    for name, field in section.model_fields.items():
        fields.append((prefix + name, field))
        for member in sections_of(field):
            fields += fields_of(member, f"{prefix}{name}{'[]' if is_list(field) else ''}.")
    return tuple(fields)


@cache
def describe(section: type[Section]) -> None:
    """Set the descriptions of all fields below `section`, from the docstrings below them. They are read from
    the source, which takes longer than to import all sections: only where descriptions are shown."""
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(body, ast.ClassDef)
            for statement, following in pairwise(body.body):
                match statement, following:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        texts[name] = inspect.cleandoc(text)
    for name, field in section.model_fields.items():
        field.description = texts.get(name)
        for member in sections_of(field):
            describe(member)


def allowed(field: FieldInfo, item: int | None = None) -> str:
    """The allowed values of a field, or of an item of its list, in words: "an integer > 0, or null"."""
    part = schema = _json_schema(field)
    if item is not None:
        part = next(option for option in schema.get("anyOf", [schema]) if option.get("type") == "array")
        part = part["items"] if "items" in part else part["prefixItems"][item]
    return _words(part, schema.get("$defs", {}))


@cache
def _json_schema(field: FieldInfo) -> dict[str, Any]:
    annotation: Any = Annotated[field.annotation, field]  # pyright: ignore[reportInvalidTypeForm]
    return TypeAdapter(annotation).json_schema()


_PLAIN = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a mapping",
    "null": "null",
}
_RULES = {
    "exclusiveMinimum": "> {:g}",
    "minimum": ">= {:g}",
    "exclusiveMaximum": "< {:g}",
    "maximum": "<= {:g}",
    "pattern": "matching {}",
}


def _words(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A JSON schema in words; `definitions` are the sections that it refers to."""
    match schema:
        case {"$ref": name}:
            return _words(definitions[name.rpartition("/")[2]], definitions)
        case {"anyOf": options} | {"oneOf": options}:
            sections = [
                definitions[o["$ref"].rpartition("/")[2]]["properties"] for o in options if "$ref" in o
            ]
            kinds = [keys["kind"]["const"] for keys in sections if "const" in keys.get("kind", {})]
            if len(kinds) < 2:
                return ", or ".join(_words(option, definitions) for option in options)
            plain = [_words(option, definitions) for option in options if "$ref" not in option]
            return ", or ".join([*plain, f"a mapping whose `kind` is one of {', '.join(kinds)}"])
        case {"properties": keys}:
            return f"a mapping with keys {', '.join(keys)}"
        case {"additionalProperties": {} as value} if value:
            return f"a mapping, each value {_words(value, definitions)}"
        case {"const": value}:
            return repr(value)
        case {"enum": values}:
            return f"one of {', '.join(map(str, values))}"
        case {"format": form}:
            return form
        case {"prefixItems": items}:
            return f"a list of {len(items)}, each {_words(items[0], definitions)}"
        case {"items": item}:
            return f"a list, each {_words(item, definitions)}"
        case _:
            rules = [words.format(schema[rule]) for rule, words in _RULES.items() if rule in schema]
            return " ".join([_PLAIN[schema["type"]], " and ".join(rules)]).rstrip()
