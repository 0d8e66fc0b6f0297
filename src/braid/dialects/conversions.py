"""Conversions that every dialect needs: conditions, tables of values, and opposites."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from .table import Became, Convert, Source, implied, no_effect, unsupported

Idle = Callable[[Source], str]
"""Why a key changes nothing in this file; empty when it does."""


def when(*idle: Idle, then: Convert | None = None) -> Convert:
    """The value, or what `then` makes of it, where no reason stands against it; else no effect, for the first reason."""

    def convert(value: Any, source: Source) -> Any:
        why = next((reason for condition in idle if (reason := condition(source))), "")
        if why:
            return no_effect(why)
        return value if then is None else then(value, source)

    return convert


def mapped(values: Mapping[Any, Any]) -> Convert:
    """The native word for each of the original's."""
    return lambda value, _: values[value]


def opposite(value: Any, _: Source) -> Any:
    """The native key asks the question the other way round."""
    return not value


def null_as(native: Any) -> Convert:
    """The native word for null."""
    return lambda value, _: native if value is None else value


def unless_null(then: Convert | None = None, why: str = "null: not set") -> Convert:
    """No effect for null; else the value, or what `then` makes of it."""
    return lambda v, source: no_effect(why) if v is None else v if then is None else then(v, source)


def several(*native: str) -> Convert:
    """The same value at several native paths."""
    return lambda value, _: Became(dict.fromkeys(native, value))


def only(usual: Any, instead: str, why: str = "how braid works") -> Convert:
    """The one value that braid has; for all others what to use instead."""
    return lambda value, _: implied(why) if value == usual else unsupported(instead)


def folder_name(text: str) -> str:
    """A run's name as the name of its folder."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def wandb_mode() -> tuple[str, str]:
    """(report.wandb.mode, why): the systems send to the network by themselves; braid does where there is a key to send with."""
    if os.environ.get("WANDB_API_KEY"):
        return "online", "online, since WANDB_API_KEY is set"
    return "offline", "offline, since WANDB_API_KEY is not set: `wandb sync` sends it later"
