"""Gymnasium environments as a simulator, stepped sequentially. Unlike in Gymnasium's SyncVectorEnv a failure affects
only its own slot, idle slots are skipped, and there are no automatic resets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from braid.errors import ConfigError, Problem, suggest
from braid.types import ActionSpace

from .base import Tick

_Answer = tuple[Any, float, bool, bool]
"""observation, reward, is_terminated, is_truncated"""


class GymnasiumSimulator:
    """`num_envs` copies of one registered environment. See base.Simulator.

    Any observations that Gymnasium can flatten are supported; they become flat float32 vectors. Action spaces
    are Discrete or Box. Box actions are clipped to the bounds here, while their log-probs remain those of the
    unclipped sample.
    """

    def __init__(self, env_id: str, num_envs: int, kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises ConfigError for an unknown id, arguments that the environment rejects, or unsupported
        spaces."""
        self._make = partial(_make, env_id, kwargs or {})
        self._envs = [self._make() for _ in range(num_envs)]
        observations, actions = self._envs[0].observation_space, self._envs[0].action_space
        if not observations.is_np_flattenable:
            raise _refused(
                "id", f"unsupported observation space of {env_id}: {observations} cannot be flattened"
            )
        self._observations = observations
        self.num_envs, self.observation_size = num_envs, spaces.flatdim(observations)
        self.action_space, self._to_action = _actions(env_id, actions)

    def reset(self, seeds: Mapping[int, int]) -> Tick:
        return self._tick({slot: partial(self._reset, slot, seed) for slot, seed in seeds.items()})

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        return self._tick({slot: partial(self._step, slot, action) for slot, action in actions.items()})

    def close(self) -> None:
        while self._envs:
            self._envs.pop().close()

    def _tick(self, calls: Mapping[int, Callable[[], _Answer]]) -> Tick:
        """Run the calls. An exception or a non-finite number is a failure of that slot only."""
        size = self.num_envs
        tick = Tick(
            np.zeros((size, self.observation_size), np.float32),
            np.zeros(size, np.float32),
            np.zeros(size, np.bool_),
            np.zeros(size, np.bool_),
            failures := {},
        )
        for slot, call in calls.items():
            try:
                observation, reward, tick.is_terminated[slot], tick.is_truncated[slot] = call()
                tick.observations[slot] = np.asarray(spaces.flatten(self._observations, observation))
                tick.rewards[slot] = reward
            except Exception as error:
                failures[slot] = f"{type(error).__name__}: {error}"
        is_finite = np.isfinite(tick.rewards) & np.isfinite(tick.observations).all(axis=1)
        for slot in set(np.flatnonzero(~is_finite).tolist()) - set(failures):
            numbers = f"reward {tick.rewards[slot]} or observation {tick.observations[slot]}"
            failures[slot] = f"{numbers} is not finite"
        for slot in failures:
            with suppress(Exception):
                self._envs[slot].close()
            self._envs[slot] = self._make()
        return tick

    def _reset(self, slot: int, seed: int) -> _Answer:
        observation, _ = self._envs[slot].reset(seed=seed)
        return observation, 0.0, False, False

    def _step(self, slot: int, action: NDArray) -> _Answer:
        observation, reward, is_terminated, is_truncated, _ = self._envs[slot].step(self._to_action(action))
        return observation, float(reward), is_terminated, is_truncated


def _make(env_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env:
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise _refused("id", f"{env_id} needs a package that is not installed: {error}") from error
    except gymnasium.error.Error as error:
        near = suggest(env_id, gymnasium.registry)
        raise _refused("id", f"Gymnasium cannot make {env_id!r}{near}: {error}") from error
    except TypeError as error:
        raise _refused("kwargs", f"{env_id} does not accept {dict(kwargs)}: {error}") from error


def _actions(env_id: str, space: spaces.Space) -> tuple[ActionSpace, Callable[[NDArray], Any]]:
    """The policy's action space, and the conversion from its actions to the environment's."""
    if isinstance(space, spaces.Discrete):
        return ActionSpace("discrete", int(space.n)), lambda action: int(space.start + action)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        size = int(np.prod(space.shape))
        return ActionSpace("continuous", size), lambda action: np.clip(
            action.reshape(space.shape), space.low, space.high
        ).astype(space.dtype)
    raise _refused(
        "id", f"unsupported action space of {env_id}: {space}; supported are Discrete, and Box of floats"
    )


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(f"env.{key}", message, "env")])
