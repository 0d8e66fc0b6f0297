"""Environments of GEM. They draw from global random numbers."""

from __future__ import annotations

from typing import Any

import gem
from gem.envs.registration import ENV_REGISTRY

from braid.envs.agents.base import Opening, Step
from braid.errors import EnvError
from braid.types import Action, Message, Prompt

from . import NO_WORDS, check_known


class Gem:
    """`kwargs` are those of gem.make. Answers are read from \\boxed{}. See base.AgentEnv."""

    needs_process = True

    def __init__(self, id: str, **kwargs: Any) -> None:
        check_known("GEM", id, ENV_REGISTRY)
        self._id, self._kwargs = id, kwargs

    def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        self._env: Any = made(self._id, self._kwargs)
        return Opening(_messages(*self._env.reset(seed=seed % 2**32)))

    def step(self, action: Action) -> Step:
        observation, reward, is_done, is_truncated, info = self._env.step(action.text)
        return Step(
            _messages(observation, info), float(reward), bool(is_done), bool(is_truncated and not is_done)
        )

    def close(self) -> None:
        """Nothing to free."""


def made(id: str, kwargs: dict[str, Any]) -> Any:
    """An environment of GEM."""
    check_known("GEM", id, ENV_REGISTRY)
    try:
        return gem.make(id, **kwargs)
    except LookupError as error:
        raise EnvError(f"{id} {NO_WORDS}") from error


def _messages(observation: str, info: dict[str, Any]) -> list[Message]:
    """The suffix is part of what the policy must read: boards are there."""
    return [{"role": "user", "content": f"{observation.rstrip()}\n{info.get('suffix', '')}".strip()}]
