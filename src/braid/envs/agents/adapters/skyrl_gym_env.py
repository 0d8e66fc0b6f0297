"""Environments of skyrl-gym, which take their task from the data row and have no seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import skyrl_gym
from omegaconf import OmegaConf
from skyrl_gym.envs.registration import registry

from braid.envs.agents.base import Opening, Step
from braid.errors import EnvError
from braid.types import Action, Message, Prompt

from . import check_known


class SkyRLGym:
    """`id` may be "module:id" of a module that registers it. `extras` are added to the task's fields; environments
    read `reward_spec` and `max_turns` there. What an environment returns as `postprocessed_action` is ignored, since
    sampled text is never changed. See base.AgentEnv."""

    def __init__(self, id: str, env_config: Mapping[str, Any] | None = None, **extras: Any) -> None:
        if ":" not in id:
            check_known("skyrl-gym", id, registry)
        self._id, self._config, self._extras = id, OmegaConf.create(dict(env_config or {})), extras

    def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        extras = {**task.fields, **self._extras}
        try:
            self._env: Any = skyrl_gym.make(self._id, env_config=self._config, extras=extras)
        except (AssertionError, KeyError) as error:
            raise EnvError(
                f"skyrl-gym's {self._id} cannot start: {error}; the task's fields and env.kwargs are {sorted(extras)}"
            ) from error
        messages, _ = self._env.init([dict(message) for message in task.messages])
        return Opening(cast("list[Message]", messages))

    def step(self, action: Action) -> Step:
        out = self._env.step(action.text)
        is_done = bool(out["done"])
        metrics = {name: float(value) for name, value in self._env.get_metrics().items()} if is_done else {}
        return Step(out["observations"], float(out["reward"]), is_done, metrics=metrics)

    def close(self) -> None:
        if hasattr(self, "_env"):
            self._env.close()
