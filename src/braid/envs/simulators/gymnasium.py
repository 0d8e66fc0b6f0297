"""Gymnasium environments as a simulator, stepped sequentially. Unlike in Gymnasium's SyncVectorEnv a failure affects
only its own slot, idle slots are skipped, and there are no automatic resets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import RescaleAction, TimeLimit
from numpy.typing import NDArray

from braid.errors import ConfigError, EnvError, Problem, suggest
from braid.functions import load_function
from braid.types import ActionSpace, Spaces

from .base import AS_IT_IS, EpisodeRules, Tick
from .rules import RuledEnv


class GymnasiumSimulator:
    """`num_envs` copies of one environment. See base.Simulator.

    `env_id` is a registered id, or the path of a class or function that makes a gymnasium.Env (package.module.Class,
    or file.py:Class relative to `base_dir`). In observations, uint8 boxes of three dimensions are images, named as in
    a Dict space (`image` if they are all there is), and a text named `instruction` belongs to the episode; everything
    else is flattened into the float32 vector `state`. Action spaces are Discrete or Box. Box actions are clipped to
    the bounds here, while their log-probs remain those of the unclipped sample. `success` or `is_success` in the info of a
    step is reported. Images are written into the arrays of `image_memory` [E, ...] if it is set, which the next call
    overwrites.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        kwargs: Mapping[str, Any] | None = None,
        *,
        base_dir: Path = Path(),
        rules: EpisodeRules = AS_IT_IS,
    ) -> None:
        """Raises ConfigError for an unknown id, arguments that the environment rejects, or unsupported
        spaces."""
        self._make = partial(_make, env_id, kwargs or {}, base_dir, rules)
        self._envs = [self._make() for _ in range(num_envs)]
        self.num_envs = num_envs
        self.resets_together = False
        self._filmed: set[int] = set()
        self._read_spaces(env_id, self._envs[0].observation_space, self._envs[0].action_space)

    def _read_spaces(self, env_id: str, seen: spaces.Space, acted: spaces.Space) -> None:
        parts = dict(seen.spaces) if isinstance(seen, spaces.Dict) else {"image": seen}
        images: dict[str, Any] = {name: space.shape for name, space in parts.items() if _is_image(space)}
        self._has_instruction = isinstance(parts.get("instruction"), spaces.Text)
        taken = {*images, "instruction"} if self._has_instruction else {*images}
        self._state: spaces.Space | None = seen
        if taken:
            left = {name: space for name, space in parts.items() if name not in taken}
            self._state = spaces.Dict(left) if left else None
        if self._state is not None and not self._state.is_np_flattenable:
            raise _refused("id", f"unsupported observation space of {env_id}: {seen} cannot be flattened")
        self._flat = partial(_flat, self._state)
        if isinstance(self._state, spaces.Dict) and len(self._state.spaces) == 1:
            ((name, only),) = self._state.spaces.items()  # the usual case, without the general way's 20 us
            if isinstance(only, spaces.Box) and only.shape is not None and len(only.shape) == 1:
                self._flat = itemgetter(name)
        state_size = 0 if self._state is None else spaces.flatdim(self._state)
        actions, self._to_action = _actions(env_id, acted)
        self._is_dict = isinstance(seen, spaces.Dict)
        self.image_memory: Mapping[str, NDArray[np.uint8]] | None = None
        self.spaces = Spaces(state_size, actions, images)

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Tick:
        self._filmed = self._filmed.difference(seeds).union(filmed)
        return self._tick(0, {slot: partial(self._reset, slot, seed) for slot, seed in seeds.items()})

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        num_actions = max(map(len, actions.values()), default=0)
        return self._tick(
            num_actions, {slot: partial(self._step, slot, chunk) for slot, chunk in actions.items()}
        )

    def close(self) -> None:
        while self._envs:
            self._envs.pop().close()

    def _tick(self, num_actions: int, calls: Mapping[int, Callable[[Tick], None]]) -> Tick:
        """Run the calls. An exception or a non-finite number is a failure of that slot only."""
        tick = Tick.empty(self.num_envs, self.spaces, num_actions, self.image_memory)
        for slot, call in calls.items():
            try:
                call(tick)
            except Exception as error:
                tick.failures[slot] = f"{type(error).__name__}: {error}"
            else:
                self._check_finite(slot, tick)
            if slot in tick.failures:
                with suppress(Exception):
                    self._envs[slot].close()
                self._envs[slot] = self._make()
        return tick

    def _check_finite(self, slot: int, tick: Tick) -> None:
        numbers = [tick.rewards[slot], tick.observations.get("state", tick.rewards)[slot]]
        if not all(np.isfinite(of).all() for of in numbers):
            tick.failures[slot] = f"reward {numbers[0]} or observation {numbers[1]} is not finite"

    def _reset(self, slot: int, seed: int, tick: Tick) -> None:
        observation, _ = self._envs[slot].reset(seed=seed)
        if self._has_instruction:
            tick.instructions[slot] = observation["instruction"]
        self._observe(slot, observation, tick)
        self._film(slot, observation, tick, self._envs[slot])

    def _step(self, slot: int, actions: NDArray, tick: Tick) -> None:
        observation: Any = None
        for number, action in enumerate(actions):
            observation, reward, is_terminated, is_truncated, info = self._envs[slot].step(
                self._to_action(action)
            )
            tick.rewards[slot, number], tick.num_executed[slot] = reward, number + 1
            tick.success[slot, number] = float(info.get("success", info.get("is_success", math.nan)))
            tick.is_terminated[slot], tick.is_truncated[slot] = is_terminated, is_truncated
            self._film(slot, observation, tick, self._envs[slot])
            if is_terminated or is_truncated:
                break
        self._observe(slot, observation, tick)

    def _observe(self, slot: int, observation: Any, tick: Tick) -> None:
        for name, shape in self.spaces.images.items():
            image = observation[name] if self._is_dict else observation
            if image.shape != shape or image.dtype != np.uint8:
                raise ValueError(f"{name} is {image.dtype} {image.shape}, but its space is uint8 {shape}")
            tick.observations[name][slot] = image
        if self._state is not None:
            tick.observations["state"][slot] = self._flat(observation)

    def _film(self, slot: int, observation: Any, tick: Tick, env: gymnasium.Env) -> None:
        if slot not in self._filmed:
            return
        for name in self.spaces.images:
            frame = observation[name] if self._is_dict else observation
            break
        else:
            frame = env.render() if env.render_mode == "rgb_array" else None
        self._add_frame(slot, frame, tick)

    def _add_frame(self, slot: int, frame: Any, tick: Tick) -> None:
        if not (isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3):
            raise EnvError("no picture for env.video: set env.kwargs.render_mode=rgb_array, or save to false")
        tick.frames.setdefault(slot, []).append(frame[..., :3])


def _flat(space: spaces.Space | None, observation: Any) -> NDArray[Any]:
    assert space is not None, "there is a state"
    if isinstance(space, spaces.Dict):
        observation = {name: observation[name] for name in space.spaces}
    return np.asarray(spaces.flatten(space, observation))


def _is_image(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def _make(env_id: str, kwargs: Mapping[str, Any], base_dir: Path, rules: EpisodeRules) -> gymnasium.Env:
    limit, registered = rules.max_episode_steps, partial(gymnasium.make, disable_env_checker=True)
    if limit is not None and not _is_path(env_id):
        registered = partial(registered, max_episode_steps=limit)
    env = make_env(registered, env_id, kwargs, base_dir)
    if rules.rescale_actions:
        env = RescaleAction(env, *unit_bounds(env_id, env.action_space))
    if limit is not None and _is_path(env_id):
        env = TimeLimit(env, limit)
    return (
        env if rules == EpisodeRules(limit, rescale_actions=rules.rescale_actions) else RuledEnv(env, rules)
    )


def make_env(registered: Callable[..., Any], env_id: str, kwargs: Mapping[str, Any], base_dir: Path) -> Any:
    """What `registered` (gymnasium.make), or a class or function of the user's own, makes. Raises ConfigError."""
    try:
        if _is_path(env_id):
            return load_function(env_id, base_dir=base_dir, key="env.id", allows_class=True)(**kwargs)
        return registered(env_id, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise _refused("id", f"{env_id} needs a package that is not installed: {error}") from error
    except gymnasium.error.Error as error:
        near = suggest(env_id, gymnasium.registry)
        raise _refused("id", f"Gymnasium cannot make {env_id!r}{near}: {error}") from error
    except ModuleNotFoundError as error:
        raise _refused("id", f"{env_id} needs a module that is not installed: {error}") from error
    except TypeError as error:
        raise _refused("kwargs", f"{env_id} does not accept {dict(kwargs)}: {error}") from error


def _is_path(env_id: str) -> bool:
    """Whether this is the path of a class or function; module:Name-v0 is registered."""
    return ".py:" in env_id or ("." in env_id and ":" not in env_id)


def unit_bounds(env_id: str, space: spaces.Space) -> tuple[NDArray, NDArray]:
    """[-1, 1] in the shape of a Box."""
    if not isinstance(space, spaces.Box) or not space.is_bounded():
        raise _refused("rescale_actions", f"the actions of {env_id} have no bounds: {space}; set it to false")
    one = np.ones(space.shape, space.dtype)
    return -one, one


def _actions(env_id: str, space: spaces.Space) -> tuple[ActionSpace, Callable[[NDArray], Any]]:
    """The policy's action space, and the conversion from its actions to the environment's."""
    if isinstance(space, spaces.Discrete):
        return ActionSpace("discrete", int(space.n)), lambda action: int(space.start + action)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        size, low, high = int(np.prod(space.shape)), space.low, space.high

        def clipped(action: NDArray) -> NDArray:  # as np.clip, which takes five times as long
            bounded = np.minimum(np.maximum(action.reshape(space.shape), low), high)
            return bounded.astype(space.dtype, copy=False)

        return ActionSpace("continuous", size), clipped
    raise _refused(
        "id", f"unsupported action space of {env_id}: {space}; supported are Discrete, and Box of floats"
    )


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(f"env.{key}", message, "env")])
