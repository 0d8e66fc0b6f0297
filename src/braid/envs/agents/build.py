"""Building agent environments by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from braid.errors import ConfigError, Problem, suggest
from braid.functions import load_function
from braid.types import Action, Prompt

from .base import Opening, Outcome, Seats, Step
from .hosts import HostedEnvs

ADAPTERS: dict[str, tuple[str, str]] = {
    "gem": ("gem_env:Gem", "gem"),
    "guess": ("guess:Guess", ""),
    "gymnasium": ("gymnasium_text:GymnasiumText", ""),
    "openenv": ("openenv_client:OpenEnv", "openenv"),
    "reasoning_gym": ("reasoning_gym_env:ReasoningGym", ""),
    "skyrl_gym": ("skyrl_gym_env:SkyRLGym", "skyrl-gym"),
    "team": ("team:Team", ""),
    "templated": ("templated:Templated", ""),
    "textarena": ("textarena_env:TextArena", "textarena"),
    "textarena_self_play": ("textarena_env:TextArenaSelfPlay", "textarena"),
    "textworld": ("textworld_env:TextWorld", "textworld"),
}
"""Name in the config -> (module:class in adapters/, braid's extra that installs the library)."""


class AgentEnvs(HostedEnvs):
    """The environments of a config.

    `name` is one of ADAPTERS, package.module.Class, or file.py:Class with a path relative to `base_dir`;
    `kwargs` are arguments of the class. `auto` runs async methods inline, other ones in threads, or both in
    processes if the class says `needs_process = True`. A class of several agents may have a method `share`,
    called once with `base_dir`, `num_processes` and the arguments: what it returns is the attribute `shared`
    of every episode, and closed at the end.
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
        self._runs_itself = hasattr(make.func, "run")
        if self._runs_itself and run_in not in ("auto", "inline"):
            raise _refused("run_in", f"an environment of several agents runs inline, not in a {run_in}")
        if run_in == "auto":
            is_async = inspect.iscoroutinefunction(getattr(make.func, "step", None))
            run_in = "inline" if is_async else "thread"
            if getattr(make.func, "needs_process", False):
                run_in = "process"
        super().__init__(make, run_in, num_processes)
        share = getattr(make.func, "share", None) if self._runs_itself else None
        self._shared = share and share(base_dir, num_processes, **kwargs)

    def __call__(self) -> Any:
        if not self._runs_itself:
            return super().__call__()
        env = self._make()
        if self._shared is not None:
            env.shared = self._shared
        return env

    async def close(self) -> None:
        await super().close()
        if self._shared is not None:
            await self._shared.close()


class MixedEnvs:
    """Environments of several kinds. `kinds` has the environments by kind, and the maximum number of turns,
    if it is limited; `kind_of` is the kind of a task."""

    def __init__(
        self, kinds: Mapping[str, tuple[AgentEnvs, int | None]], kind_of: Callable[[Prompt], str]
    ) -> None:
        self._kinds, self._kind_of = kinds, kind_of

    def __call__(self) -> MixedEnv:
        return MixedEnv(self._env_for)

    def _env_for(self, task: Prompt) -> tuple[Any, int | None]:
        envs, max_turns = self._kinds[self._kind_of(task)]
        return envs(), max_turns

    async def close(self) -> None:
        for envs, _ in self._kinds.values():
            await envs.close()


class MixedEnv:
    """An environment whose kind follows from the task. See base.AgentEnv and base.MultiAgentEnv."""

    def __init__(self, env_for: Callable[[Prompt], tuple[Any, int | None]]) -> None:
        """`env_for` returns a HostedEnv or a MultiAgentEnv, and its maximum number of turns."""
        self._env_for = env_for
        self._env: Any = None
        self._turns_left: int | None = None

    async def ready(self, task: Prompt) -> None:
        """See HostedEnv. The other attributes are those of the task's environment from then on."""
        self._env, self._turns_left = self._env_for(task)
        if ready := getattr(self._env, "ready", None):
            await ready(task)

    @property
    def agents(self) -> tuple[str, ...]:
        return getattr(self._env, "agents", ())

    @property
    def untrained(self) -> tuple[str, ...]:
        return getattr(self._env, "untrained", ())

    @property
    def opponents(self) -> tuple[str, ...]:
        return getattr(self._env, "opponents", ())

    async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
        seats.max_turns = self._turns_left or seats.max_turns
        return await self._env.run(task, seed, seats)

    async def start(self, task: Prompt, seed: int) -> Opening:
        if self._env is None:
            await self.ready(task)
        assert self._env is not None
        return await self._env.start(task, seed)

    async def step(self, action: Action) -> Step:
        assert self._env is not None, "step() before the start"
        step = await self._env.step(action)
        if self._turns_left is not None:
            self._turns_left -= 1
            if self._turns_left == 0 and not step.is_done:
                step = replace(step, is_truncated=True)
        return step

    async def close(self) -> None:
        if self._env is not None:
            await self._env.close()


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
