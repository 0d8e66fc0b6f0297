"""Steps of conversions, shared by all dialects: conditions, value tables, fixed values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from .table import Became, Convert, Source, implied, no_effect, unsupported


def unless(test: Callable[[Source], Any], why: str | Callable[[Source], str]) -> Convert:
    """No effect in a file for which `test` holds."""

    def convert(value: Any, source: Source) -> Any:
        return no_effect(why if isinstance(why, str) else why(source)) if test(source) else value

    return convert


def needs(key: str, *values: Any) -> Convert:
    """No effect unless another key is on, or has one of `values`."""
    name = key.lstrip(".")

    def why(source: Source) -> str:
        now = "not set" if source[key] is None else source[key]
        return f"for {name}={' or '.join(values)} only; it is {now}" if values else f"{name} is off"

    return unless(lambda s: s[key] not in values if values else not s[key], why)


def overridden(*keys: str) -> Convert:
    """No effect where the file has one of other keys."""

    def convert(value: Any, source: Source) -> Any:
        found = next((key for key in keys if source.has(key)), None)
        return value if found is None else no_effect(f"overridden by {found}")

    return convert


def of_engine(*names: str) -> Convert:
    """No effect unless the rollout engine is one of `names`."""
    return _only_of("engine", names)


def of_backend(*names: str) -> Convert:
    """No effect unless the training backend is one of `names`."""
    return _only_of("backend", names)


def _only_of(place: str, names: tuple[str, ...]) -> Convert:
    return unless(
        lambda s: s.place(place) not in names,
        lambda s: f"for {' and '.join(names)} only; the {place} is {s.place(place)}",
    )


def mapped(values: Mapping[Any, Any]) -> Convert:
    """Look up the native value in a table."""
    return lambda value, _: values[value]


def opposite(value: Any, _: Source) -> Any:
    """Negate the value: the native key has the opposite meaning."""
    return not value


def or_null(value: Any, _: Source) -> Any:
    """Null for 0."""
    return value or None


def at_least_0(value: Any, _: Source) -> Any:
    """0 for negative values, which mean never."""
    return max(value, 0)


def null_as(native: Any) -> Convert:
    """Replace null by `native`."""
    return lambda value, _: native if value is None else value


def unless_null(why: str = "not set", result: Callable[[str], Became] = no_effect) -> Convert:
    """No effect (or another result) for null."""
    return lambda value, _: result(f"null: {why}") if value is None else value


def only(usual: Any, instead: str, why: str = "braid always does this") -> Convert:
    """Accept the one value that braid supports; other values are unsupported, with `instead` as the
    alternative."""
    return lambda value, _: implied(why) if value == usual else unsupported(instead)


def off(instead: str, why: str) -> Convert:
    """Accept a feature that braid lacks only when disabled (false, null, 0, empty)."""
    return lambda value, _: unsupported(instead) if value else implied(why)


def folder_name(text: str, _: Source | None = None) -> str:
    """Convert a run name to a valid folder name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def wandb_mode() -> tuple[str, str]:
    """Return (report.wandb.mode, reason). The original systems always log online; braid does only if
    WANDB_API_KEY is set."""
    if os.environ.get("WANDB_API_KEY"):
        return "online", "online, because WANDB_API_KEY is set"
    return "offline", "offline, because WANDB_API_KEY is not set; upload later with `wandb sync`"


def already(why: str) -> Convert:
    """A flag for something that braid always does; false has no effect."""
    return lambda value, _: implied(why) if value else no_effect(why)
