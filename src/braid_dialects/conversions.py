"""Conversions shared by all dialects: conditions, value tables, and negation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from .table import Became, Convert, Source, implied, no_effect, unsupported

Idle = Callable[[Source], str]
"""Reason why a key has no effect in this file; empty if it has one."""


def when(*idle: Idle, then: Convert | None = None) -> Convert:
    """Apply the value, converted by `then` if given, unless a condition in `idle` gives a reason; then the
    key has no effect, for the first such reason."""

    def convert(value: Any, source: Source) -> Any:
        why = next((reason for condition in idle if (reason := condition(source))), "")
        if why:
            return no_effect(why)
        return value if then is None else then(value, source)

    return convert


def mapped(values: Mapping[Any, Any]) -> Convert:
    """Look up the native value in a table."""
    return lambda value, _: values[value]


def opposite(value: Any, _: Source) -> Any:
    """Negate the value: the native key has the opposite meaning."""
    return not value


def null_as(native: Any) -> Convert:
    """Replace null by `native`."""
    return lambda value, _: native if value is None else value


def unless_null(then: Convert | None = None, why: str = "null: not set") -> Convert:
    """No effect for null; otherwise the value, converted by `then` if given."""
    return lambda v, source: no_effect(why) if v is None else v if then is None else then(v, source)


def several(*native: str) -> Convert:
    """Set several native keys to the value."""
    return lambda value, _: Became(dict.fromkeys(native, value))


def only(usual: Any, instead: str, why: str = "braid always does this") -> Convert:
    """Accept the one value that braid supports; other values are unsupported, with `instead` as the
    alternative."""
    return lambda value, _: implied(why) if value == usual else unsupported(instead)


def folder_name(text: str) -> str:
    """Convert a run name to a valid folder name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def wandb_mode() -> tuple[str, str]:
    """Return (report.wandb.mode, reason). The original systems always log online; braid does only if
    WANDB_API_KEY is set."""
    if os.environ.get("WANDB_API_KEY"):
        return "online", "online, because WANDB_API_KEY is set"
    return "offline", "offline, because WANDB_API_KEY is not set; upload later with `wandb sync`"
