"""The older notation of rules, which the tables of RLinf and SkyRL use until they are rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .conversions import folder_name, mapped, null_as, only, opposite, wandb_mode
from .table import (
    ABSENT,
    Became,
    Check,
    Convert,
    Dialect,
    Rule,
    Source,
    implied,
    no_effect,
    unsupported,
)
from .table import table as rules_of
from .values import ANY, Takes

Idle = Callable[[Source], str]


def Apply(  # noqa: N802, PLR0913, RUF100
    path: str,
    native: str,
    takes: Takes,
    convert: Convert | None = None,
    default: Any = ABSENT,
    note: str = "",
) -> Rule:
    return Rule(path, takes, "applied", note, native, () if convert is None else (convert,), default)


def Implied(path: str, takes: Takes, why: str) -> Rule:
    return Rule(path, takes, "implied", why)


def NoEffect(path: str, takes: Takes, why: str) -> Rule:
    return Rule(path, takes, "no effect", why)


def Unsupported(path: str, instead: str, takes: Takes = ANY, default: Any = ABSENT) -> Rule:
    return Rule(path, takes, "unsupported", instead, default=default)


def table(*rules: Rule) -> Mapping[str, Rule]:
    return rules_of(list(rules))


def become(rule: Rule, value: Any, source: Source) -> Became:
    return rule.become(value, source)


def when(*idle: Idle, then: Convert | None = None) -> Convert:
    def convert(value: Any, source: Source) -> Any:
        why = next((reason for condition in idle if (reason := condition(source))), "")
        if why:
            return no_effect(why)
        return value if then is None else then(value, source)

    return convert


def unless_null(then: Convert | None = None, why: str = "null: not set") -> Convert:
    return lambda v, source: no_effect(why) if v is None else v if then is None else then(v, source)


__all__ = [
    "ABSENT",
    "Became",
    "Check",
    "Convert",
    "Dialect",
    "Rule",
    "Source",
    "folder_name",
    "implied",
    "mapped",
    "no_effect",
    "null_as",
    "only",
    "opposite",
    "unsupported",
    "wandb_mode",
]
