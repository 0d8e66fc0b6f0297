"""Kinds of a user's own: a class, or a function, named by its path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from braid.errors import ConfigError, suggest
from braid.functions import is_given, load_function

from .kinds import Kind

K = TypeVar("K", bound=Kind)


def is_path(kind: object) -> bool:
    """Whether `kind` names something of the user's own: `file.py:name` or `package.module.name`."""
    return isinstance(kind, str) and (":" in kind or "." in kind)


def own_kind(family: type[K], path: str, settings: Mapping[str, Any], *, base_dir: Path) -> K:
    """The user's class or function at `path` as one of `family`, with `settings` as its fields.

    File paths are relative to `base_dir`. Raises ValueError if there is none, if it is not of the family, or
    for settings that it does not have.
    """
    try:
        loaded = load_function(path, base_dir=base_dir, key=family.config_key, allows_class=True)
    except ConfigError as error:
        if not is_given(path):
            raise ValueError(error.problems[0].message) from error
        loaded = _Missing(error.problems[0].message)  # an evaluation or an export does not need it
    if not isinstance(loaded, type):
        if settings:
            raise ValueError(
                f"{path!r} is a function, which has no settings such as {next(iter(settings))!r}; remove "
                f"them, or write a class of {family.__name__} with these fields"
            )
        made = family.of_function(loaded)
    elif not issubclass(loaded, family):
        raise ValueError(
            f"{path!r} is not a class of braid.algorithms.{family.__name__}; derive it from that"
        )
    else:
        try:
            made = loaded.model_validate(dict(settings))
        except ValidationError as error:
            raise ValueError(f"{path}: {_first_problem(error, loaded)}") from None
    return made.at(path, base_dir)


class _Missing:
    """In place of a function that was passed to the Python API of another process."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __call__(self, *_: Any) -> Any:
        raise ValueError(self._why)


def _first_problem(error: ValidationError, kind: type[Kind]) -> str:
    detail = error.errors(include_url=False)[0]
    name = str(detail["loc"][0]) if detail["loc"] else ""
    if detail["type"] == "extra_forbidden":
        keys = [key for key in kind.model_fields if key != "kind"]
        return f"unknown key {name!r}{suggest(name, keys)}; its keys are {', '.join(keys) or 'none'}"
    return f"{name}: {detail['msg']}" if name else detail["msg"]
