"""Conditions: the steps of a conversion without which a key has no effect, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .table import Convert, Source, no_effect


def unless(test: Callable[[Source], Any], why: str | Callable[[Source], str]) -> Convert:
    """No effect in a file for which `test` holds."""

    def convert(value: Any, source: Source) -> Any:
        return no_effect(why if isinstance(why, str) else why(source)) if test(source) else value

    return convert


def refused(why: Callable[[Any, Source], Any]) -> Convert:
    """Reject a value for which `why` returns the reason."""

    def convert(value: Any, source: Source) -> Any:
        if reason := why(value, source):
            raise ValueError(reason)
        return value

    return convert


def needs(key: str, *values: Any) -> Convert:
    """No effect unless another key is on, or has one of `values`."""
    name = key.lstrip(".")

    def why(source: Source) -> str:
        now = {"None": "not set", "False": "off"}.get(str(source[key]), source[key])
        return f"for {name}={' or '.join(values)} only; it is {now}" if values else f"{name} is {now}"

    return unless(lambda s: s[key] not in values if values else not s[key], why)


def overridden(key: str) -> Convert:
    """No effect where the file has another key."""
    return unless(lambda s: s.has(key), f"overridden by {key}")


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


BY_BACKEND = unless(lambda s: s.backend, lambda s: f"overridden by --backend {s.backend}")
BY_ENGINE = unless(lambda s: s.engine, lambda s: f"overridden by --engine {s.engine}")
