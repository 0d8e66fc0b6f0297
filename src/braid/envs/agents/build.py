"""Building agent environments by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from braid.errors import ConfigError, Problem, suggest
from braid.functions import load_function

from .hosts import HostedEnvs

ADAPTERS: dict[str, tuple[str, str]] = {
    "gem": ("gem_env:Gem", "gem"),
    "guess": ("guess:Guess", ""),
    "gymnasium": ("gymnasium_text:GymnasiumText", ""),
    "openenv": ("openenv_client:OpenEnv", "openenv"),
    "reasoning_gym": ("reasoning_gym_env:ReasoningGym", ""),
    "skyrl_gym": ("skyrl_gym_env:SkyRLGym", "skyrl-gym"),
    "textarena": ("textarena_env:TextArena", "textarena"),
    "textworld": ("textworld_env:TextWorld", "textworld"),
}
"""Name in the config -> (module:class in adapters/, braid's extra that installs the library)."""


class AgentEnvs(HostedEnvs):
    """The environments of a config.

    `name` is one of ADAPTERS, package.module.Class, or file.py:Class with a path relative to `base_dir`; `kwargs` are
    arguments of the class. `auto` runs async methods inline, other ones in threads, or both in processes if the class
    says `needs_process = True`.
    """

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        base_dir: Path,
        run_in: Literal["auto", "inline", "thread", "process"] = "auto",
        num_processes: int = 1,
    ) -> None:
        """Raises ConfigError."""
        make = _maker(name, kwargs, base_dir)
        if run_in == "auto":
            is_async = inspect.iscoroutinefunction(getattr(make.func, "step", None))
            run_in = "inline" if is_async else "thread"
            if getattr(make.func, "needs_process", False):
                run_in = "process"
        super().__init__(make, run_in, num_processes)


class _Maker(partial[Any]):
    """Makes environments. In another process the class is found by its name, and so may be in a file."""

    source: tuple[str, Mapping[str, Any], Path]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, Mapping[str, Any], Path]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _maker, self.source


def _maker(name: str, kwargs: Mapping[str, Any], base_dir: Path) -> _Maker:
    env_class = (
        _adapter(name)
        if name.isidentifier()
        else load_function(name, base_dir=base_dir, key="env.name", allows_class=True)
    )
    try:
        inspect.signature(env_class).bind(**kwargs)
    except TypeError as error:
        raise _refused("kwargs", f"{name} takes {inspect.signature(env_class)}: {error}") from None
    make = _Maker(env_class, **kwargs)
    make.source = name, dict(kwargs), base_dir
    return make


def _adapter(name: str) -> type:
    if name not in ADAPTERS:
        near = suggest(name, ADAPTERS) or f"; available: {', '.join(ADAPTERS)}"
        raise _refused("name", f"unknown environment {name!r}{near}; for your own write file.py:Class")
    (module, _, class_name), extra = ADAPTERS[name][0].partition(":"), ADAPTERS[name][1]
    try:
        return getattr(importlib.import_module(f".adapters.{module}", __package__), class_name)
    except ImportError as error:
        install = f"pip install 'braid-rl[{extra}]'" if extra else "install it into braid's environment"
        raise _refused(
            "name", f"{name} needs a package that cannot be imported ({error}): {install}"
        ) from error


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(f"env.{key}", message, "config")])
