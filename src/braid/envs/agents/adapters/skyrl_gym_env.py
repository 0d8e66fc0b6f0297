"""Environments of skyrl-gym, and classes with its methods, which take their task from the data row and have
no seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from braid.envs.agents.base import Opening, Step
from braid.errors import EnvError
from braid.functions import load_function
from braid.types import Action, Message, Prompt

from . import check_known, refused


class SkyRLGym:
    """`id` may be "module:id" of a module that registers it, or package.module.Class; the task's field
    `id_key` takes precedence over it. `extras` are added to the task's fields; environments read
    `reward_spec` and `max_turns` there. What an environment returns as `postprocessed_action` is ignored,
    since sampled text is never changed. See base.AgentEnv."""

    def __init__(
        self, id: str, env_config: Mapping[str, Any] | None = None, id_key: str | None = None, **extras: Any
    ) -> None:
        self._id, self._id_key, self._extras = id, id_key, extras
        self._config = OmegaConf.create(dict(env_config or {}))
        self._make = _maker(id)

    def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        extras = {**task.fields, **self._extras}
        if (env_id := extras.get(self._id_key or "", self._id)) != self._id:
            self._id, self._make = str(env_id), _maker(str(env_id))
        try:
            self._env: Any = self._make(env_config=self._config, extras=extras)
        except (AssertionError, KeyError) as error:
            raise EnvError(
                f"skyrl-gym's {self._id} cannot start: {error}; the task's fields and env.kwargs are "
                f"{sorted(extras)}"
            ) from error
        messages, _ = self._env.init([dict(message) for message in task.messages])
        return Opening(cast("list[Message]", messages))

    def step(self, action: Action) -> Step:
        out = self._env.step(action.text)
        is_done = bool(out["done"])
        env_metrics = self._env.get_metrics() if is_done and hasattr(self._env, "get_metrics") else {}
        metrics = {name: float(value) for name, value in env_metrics.items()}
        return Step(out["observations"], float(out["reward"]), is_done, metrics=metrics)

    def close(self) -> None:
        if hasattr(self, "_env"):
            self._env.close()


def _maker(id: str) -> Callable[..., Any]:
    if "." in id and ":" not in id:
        return load_function(id, base_dir=Path(), key="env.kwargs.id", allows_class=True)
    try:
        import skyrl_gym
        from skyrl_gym.envs.registration import registry
    except ImportError as error:
        raise refused(f"{id} needs skyrl-gym ({error}): pip install 'braid-rl[skyrl-gym]'") from error
    if ":" not in id:
        check_known("skyrl-gym", id, registry)
    return partial(skyrl_gym.make, id)
