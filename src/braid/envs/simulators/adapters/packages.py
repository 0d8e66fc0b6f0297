"""Packages of simulators: what is not installed or not known is an error of the config."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from braid.envs.simulators.base import refused
from braid.errors import ConfigError, suggest

_MAX_NAMED = 20


def imported(module: str, simulator: str, extra: str) -> Any:
    """Import a module of a simulator's package. Raises ConfigError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise not_installed(simulator, extra, f"cannot be imported ({error})") from error


def not_installed(simulator: str, extra: str, why: str = "is not installed") -> ConfigError:
    """The error of a missing package, which belongs to an extra of braid."""
    return refused("kind", f"{simulator} {why}; run: pip install 'braid-rl[{extra}]'")


def check_known(simulator: str, what: str, name: str, known: Iterable[str], key: str) -> None:
    """Raise ConfigError, with the nearest name, if `name` is unknown."""
    names = list(known)
    if name not in names:
        has = f"; it has {', '.join(names)}" if len(names) <= _MAX_NAMED else ""
        raise refused(key, f"{simulator} has no {what} {name!r}{suggest(name, names)}{has}")
