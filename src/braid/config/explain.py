"""Readable error messages for invalid configs: schema errors with the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from braid.errors import suggest

from .base import Section
from .habits import HABITS
from .schema import RunConfig
from .shape import allowed, allowed_item, fields_of, kind_of, shape_of
from .source import ROOT, child

_ABSENT = object()
MAX_HINTS = 50
"""Problems that get a suggestion; searching for one is slow."""


def explain(error: ValidationError, tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, message) of each schema error in `tree`; one per key."""
    seen: set[str] = set()
    listed: set[type[Section]] = set()
    for detail in error.errors(include_url=False):
        spot = _locate(detail["loc"], tree)
        if spot.key in seen:
            continue
        seen.add(spot.key)
        if detail["type"] == "extra_forbidden":
            yield spot.key, "unknown key" + (_meant(spot, listed) if len(seen) <= MAX_HINTS else "")
        else:
            yield spot.key or ROOT, _message(detail["type"], detail.get("ctx", {}), spot)


def unlike_numbers(
    tree: Any, section: type[Section] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """(key, message) of each boolean where a number or text is expected. Python counts True as 1, and so does
    the schema, but `group_size: true` is a mistake."""
    for name, value in tree.items() if isinstance(tree, dict) else ():
        field = section.model_fields.get(name)
        if field is None:
            continue
        key, shape = child(prefix, name), shape_of(field)
        items = (
            [(child(key, i), v) for i, v in enumerate(value)] if isinstance(value, list) else [(key, value)]
        )
        takes_bool = "true or false" in allowed(field) or get_origin(field.annotation) is dict
        for at, item in items:
            if isinstance(item, bool) and not shape.sections and not takes_bool:
                yield at, _not_allowed(item, allowed(field) if at == key else allowed_item(field))
            elif (member := shape.section_for(item)) is not None:
                yield from unlike_numbers(item, member, f"{at}")


def show_value(value: Any) -> str:
    """A value as the user would write it, truncated to 60 characters."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class _Spot:
    """Location of a schema error: key, value, the section that the key belongs to, and its field, if it has
    one. `is_item`: the value is an item of the field's list. `kinds`: the alternatives to `section` in a
    union."""

    key: str
    value: Any
    section: type[Section]
    field: FieldInfo | None
    is_item: bool = False
    kinds: tuple[type[Section], ...] = ()


def _locate(loc: tuple[str | int, ...], tree: Any) -> _Spot:
    """Resolve a pydantic error location, which also contains the names of union members."""
    spot = _Spot("", tree, RunConfig, None)
    inner: type[Section] | None = RunConfig
    kinds: tuple[type[Section], ...] = ()
    rest = list(loc)
    while rest and inner is not None:
        name = str(rest.pop(0))
        value = spot.value.get(name, _ABSENT) if isinstance(spot.value, dict) else _ABSENT
        spot = _Spot(child(spot.key, name), value, inner, inner.model_fields.get(name), kinds=kinds)
        if spot.field is None:
            return spot
        shape = shape_of(spot.field)
        inner = shape.sections[0] if len(shape.sections) == 1 else None
        kinds = shape.sections
        is_list = shape.is_list or (
            get_origin(spot.field.annotation) is tuple and get_args(spot.field.annotation)[-1] is Ellipsis
        )
        if is_list and rest and isinstance(rest[0], int) and isinstance(spot.value, list):
            index = rest.pop(0)
            assert isinstance(index, int), "checked above"
            item = spot.value[index] if index < len(spot.value) else _ABSENT
            spot = _Spot(f"{spot.key}[{index}]", item, spot.section, spot.field, is_item=True)
        if rest and len(shape.sections) > 1:
            kind = rest.pop(0)
            inner = next(s for s in shape.sections if kind_of(s) == kind)
    return spot


def _message(kind: str, context: Mapping[str, Any], spot: _Spot) -> str:
    if kind == "value_error":
        return str(context["error"])
    if spot.field is None:
        return _not_allowed(spot.value, "a mapping")
    if spot.value is _ABSENT:
        return f"missing required key: {_first_sentence(spot.field.description or '')}"
    words = allowed_item(spot.field) if spot.is_item else allowed(spot.field)
    kinds = [k for s in shape_of(spot.field).sections if (k := kind_of(s)) is not None]
    if kind == "union_tag_not_found":
        return f"missing `kind`; set it to one of {', '.join(kinds)}"
    if kind == "union_tag_invalid":
        return f"kind: {_not_allowed(spot.value['kind'], 'one of ' + ', '.join(kinds))}"
    if spot.value is None and shape_of(spot.field).sections:
        return f"is empty; remove it, or set it to {words}"
    return _not_allowed(spot.value, words)


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""torch dtype name -> config dtype name."""


def _not_allowed(value: Any, words: str) -> str:
    needs_quotes = words.startswith("a string") and isinstance(value, bool | int | float)
    hint = "; put it in quotes" if needs_quotes else ""
    if isinstance(value, str) and (dtype := _DTYPES.get(value.removeprefix("torch."))) and dtype in words:
        hint = f"; write {dtype}"
    return f"{show_value(value)} is not {words}{hint}"


def _meant(spot: _Spot, listed: set[type[Section]]) -> str:
    """Suggestion for an unknown key. The keys of a section are listed only once; `listed` has the sections
    already listed."""
    name = spot.key.rpartition(".")[2]
    own = list(spot.section.model_fields)
    if name in HABITS:
        return f"; braid's equivalent: {HABITS[name]}"
    if near := suggest(name, own):
        return near
    if others := [str(kind_of(s)) for s in spot.kinds if name in s.model_fields]:
        return f" for kind {kind_of(spot.section)}; available for kind {' and '.join(others)}"
    homes = sorted({path for path, _ in fields_of(RunConfig) if path.rpartition(".")[2] == name}, key=len)
    if homes:
        return f" in this section, did you mean {' or '.join(homes[:2])}?"
    if spot.section in listed:
        return ""
    listed.add(spot.section)
    return f"; the keys of this section are {', '.join(own)}"


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).split(". ")[0].rstrip(".")
