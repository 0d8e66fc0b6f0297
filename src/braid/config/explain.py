"""Readable error messages for invalid configs: schema errors with the value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from braid.errors import suggest
from braid.sections import Section

from .habits import HABITS
from .kinds import OWN_FORM, kinds_of
from .moved import MOVED
from .schema import RunConfig
from .shape import allowed, describe, fields_of, is_list, kind_of, sections_of
from .source import child, is_within, leaves, path_text

_ABSENT = object()
MAX_HINTS = 50
"""Problems that get a suggestion; searching for one is slow."""


def explain(error: ValidationError, tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, message) of each schema error in `tree`; one per key."""
    explained: set[str] = set()
    listed: set[type[Section]] = set()
    for detail in error.errors(include_url=False):
        spot = _locate(detail["loc"], tree)
        if spot.key in explained:
            continue
        explained.add(spot.key)
        if spot.field is None:
            yield spot.key, "unknown key" + (_meant(spot, listed) if len(explained) <= MAX_HINTS else "")
        else:
            yield spot.key, _message(detail, spot, spot.field)


def unlike_numbers(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, message) of each boolean in place of a number. Python counts True as 1, and so does pydantic, but
    `group_size: true` is a mistake."""
    fields = dict(fields_of(RunConfig))
    for path, value in leaves(tree):
        if not isinstance(value, bool):
            continue
        item = path[-1] if isinstance(path[-1], int) else None
        name = path_text(path if item is None else path[:-1])
        field = fields.get(re.sub(r"\[\d+\]", "[]", name))
        if field is None or bool in (field.annotation, *get_args(field.annotation)):
            continue
        if item is None or is_list(field):
            yield path_text(path), _not_allowed(value, allowed(field, item))


def show_value(value: Any) -> str:
    """A value as the user would write it, truncated to 60 characters."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class _Spot:
    """A key with an error, the section that it belongs to, and its field, None if it is unknown. `item` is an
    index in the field's list. `kinds` are the alternatives to `section` in a union."""

    key: str
    value: Any
    section: type[Section] = RunConfig
    field: FieldInfo | None = None
    item: int | None = None
    kinds: tuple[type[Section], ...] = ()


def _locate(loc: tuple[str | int, ...], tree: Any) -> _Spot:
    """Resolve a pydantic error location, which also contains the names of union members."""
    spot = _Spot("", tree)
    sections: tuple[type[Section], ...] = (RunConfig,)
    kinds: tuple[type[Section], ...] = ()
    for part in loc:
        if isinstance(part, int):
            if part >= len(spot.value):  # a list of fixed length is too short
                break
            spot = _Spot(child(spot.key, part), spot.value[part], spot.section, spot.field, part)
        elif len(sections) > 1:
            kinds, sections = sections, tuple(s for s in sections if kind_of(s) == part)
        elif sections:
            value = spot.value.get(part, _ABSENT)
            field = sections[0].model_fields.get(part)
            spot = _Spot(child(spot.key, part), value, sections[0], field, kinds=kinds)
            sections, kinds = () if field is None else sections_of(field), ()
        else:
            break
    return spot


def _message(detail: ErrorDetails, spot: _Spot, field: FieldInfo) -> str:
    kind, sections = detail["type"], sections_of(field)
    if kind == "value_error":
        return str(detail["ctx"]["error"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
    if spot.value is _ABSENT:
        describe(spot.section)
        return f"missing required key: {_first_sentence(field.description or '')}"
    kinds = f"one of {', '.join(str(kind_of(section)) for section in sections)}"
    if kind == "union_tag_not_found":
        return f"missing `kind`; set it to {kinds}"
    if kind == "union_tag_invalid":
        name = spot.value["kind"] if isinstance(spot.value, dict) else spot.value
        own_form = f", or {OWN_FORM}" if kinds_of(field) else ""
        near = suggest(name.lower(), map(str, map(kind_of, sections))) if isinstance(name, str) else ""
        return f"kind: {_not_allowed(name, f'{kinds}{own_form}')}{near}"
    words = allowed(field, spot.item)
    if spot.value is None and sections:
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
    """Suggestion for an unknown key. The keys of a section are listed once; `listed` has those sections."""
    name = spot.key.rpartition(".")[2]
    keys = list(spot.section.model_fields)
    if spot.key in MOVED:
        return f"; it is now {MOVED[spot.key]}"
    if others := [str(kind_of(s)) for s in spot.kinds if name in s.model_fields]:
        return f" for kind {kind_of(spot.section)}; available for kind {' and '.join(others)}"
    if name in HABITS:
        return f"; braid's equivalent: {HABITS[name]}"
    if near := suggest(name, keys):
        return near
    homes = sorted({path for path, _ in fields_of(RunConfig) if path.rpartition(".")[2] == name}, key=len)
    section = spot.key.rpartition(".")[0]
    homes = [path for path in homes if section and is_within(path, section)][:1] or homes
    if homes:
        return f" in this section, did you mean {' or '.join(homes[:2])}?"
    if spot.section in listed:
        return ""
    listed.add(spot.section)
    return f"; the keys of this section are {', '.join(keys)}"


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).split(". ")[0].rstrip(".")
