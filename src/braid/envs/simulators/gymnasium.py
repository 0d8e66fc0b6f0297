"""Gymnasium environments as a simulator, stepped sequentially. Unlike in Gymnasium's SyncVectorEnv a failure
affects only its own slot, idle slots are skipped, and there are no automatic resets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
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

from braid.errors import EnvError, suggest
from braid.functions import load_function
from braid.types import ActionSpace, Spaces
from braid.users import as_env_error, finite_number, is_the_users, truth

from .base import AS_IT_IS, EpisodeRules, Tick, as_array, refused
from .rules import RuledEnv


class GymnasiumSimulator:
    """`num_envs` copies of one environment. See base.Simulator.

    `env_id` is a registered id, or the path of a class or function that makes a gymnasium.Env
    (package.module.Class, or file.py:Class relative to `base_dir`). In observations, uint8 boxes of three
    dimensions are images, named as in a Dict space (`image` if they are all there is), and a text named
    `instruction` belongs to the episode; everything else is flattened into the float32 vector `state`. Action
    spaces are Discrete or Box. Box actions are clipped to the bounds here, while their log-probs remain those
    of the unclipped sample. `success` or `is_success` in the info of a step is reported. Images are written
    into the arrays of `image_memory` [E, ...] if it is set, which the next call overwrites. An environment
    with `images_on_demand` and `with_images(observation)` renders only the images that are read, which leaves
    out those within a chunk of actions.
    """

    _images_on_demand = False

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
        self._images_on_demand = hasattr(self._envs[0].unwrapped, "images_on_demand")
        self._read_spaces(env_id, self._envs[0].observation_space, self._envs[0].action_space)

    def _read_spaces(self, env_id: str, observation_space: spaces.Space, acted: spaces.Space) -> None:
        self._observation_space = observation_space
        parts = (
            dict(observation_space.spaces)
            if isinstance(observation_space, spaces.Dict)
            else {"image": observation_space}
        )
        images: dict[str, Any] = {name: space.shape for name, space in parts.items() if _is_image(space)}
        self._has_instruction = isinstance(parts.get("instruction"), spaces.Text)
        taken = {*images, "instruction"} if self._has_instruction else {*images}
        self._state: spaces.Space | None = observation_space
        if taken:
            left = {name: space for name, space in parts.items() if name not in taken}
            self._state = spaces.Dict(left) if left else None
        if self._state is not None and not self._state.is_np_flattenable:
            raise refused(
                "id", f"unsupported observation space of {env_id}: {observation_space} cannot be flattened"
            )
        state_size = 0 if self._state is None else spaces.flatdim(self._state)
        self._flat: Callable[[Any], Any] = partial(_flat, self._state)
        self._is_flat = self._state is None
        only, read = self._state, lambda observation: observation
        if isinstance(only, spaces.Dict) and len(only.spaces) == 1:
            ((name, only),) = only.spaces.items()
            read = itemgetter(name)
        if isinstance(only, spaces.Box) and only.shape == (state_size,):
            self._flat, self._is_flat = read, True  # the usual case, without the general way's 20 us
        actions, self._to_action = _actions(env_id, acted)
        self._is_dict = isinstance(observation_space, spaces.Dict)
        self.image_memory: Mapping[str, NDArray[np.uint8]] | None = None
        self.spaces = Spaces(state_size, actions, images)

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Tick:
        self._filmed = self._filmed.difference(seeds).union(filmed)
        tick = Tick.empty(self.num_envs, self.spaces, 0, self.image_memory)
        results = _each(tick, seeds, lambda slot: self._envs[slot].reset(seed=seeds[slot]))
        _each(tick, results, lambda slot: self._note_reset(slot, results[slot], tick))
        return self._repaired(tick, seeds)

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        num_actions = max(map(len, actions.values()), default=0)
        tick = Tick.empty(self.num_envs, self.spaces, num_actions, self.image_memory)
        # All environments are stepped before any result is read: code that stays in the processor's caches is
        # faster.
        chunks = dict(zip(actions, self._to_action(np.array(list(actions.values()))), strict=True))
        last: dict[int, Any] = {}
        for number in range(num_actions):
            results = _each(tick, chunks, lambda slot: self._envs[slot].step(chunks[slot][number]))  # noqa: B023
            last |= results
            is_over = _each(tick, results, lambda slot: self._note_step(slot, number, results[slot], tick))  # noqa: B023
            chunks = {
                slot: chunks[slot]
                for slot, it in is_over.items()
                if not it and number + 1 < len(chunks[slot])
            }
        _each(tick, last.keys() - tick.failures.keys(), lambda slot: self._observe(slot, last[slot][0], tick))
        return self._repaired(tick, actions)

    def close(self) -> None:
        while self._envs:
            self._envs.pop().close()

    def _repaired(self, tick: Tick, slots: Collection[int]) -> Tick:
        """With non-finite numbers as failures. The environments of failed slots are made anew."""
        check_finite(slots, tick)
        for slot in tick.failures:
            with suppress(Exception):
                self._envs[slot].close()
            self._envs[slot] = self._make()
        return tick

    def _note_reset(self, slot: int, result: Any, tick: Tick) -> None:
        if not (isinstance(result, tuple) and len(result) == 2):
            raise EnvError(f"reset returned {_outline(result)}, not (observation, info)")
        self._begin(slot, result[0], tick)
        self._film(slot, result[0], tick)

    def _note_step(self, slot: int, number: int, result: Any, tick: Tick) -> bool:
        """Store what the action of this number gave, except for the observation; whether the episode is
        over."""
        try:
            observation, reward, is_terminated, is_truncated, info = result
            reward = reward if type(reward) is float else finite_number(reward, "the reward is")
            is_terminated = truth(is_terminated, "is_terminated")
            is_truncated = truth(is_truncated, "is_truncated")
            tick.rewards[slot, number], tick.num_executed[slot] = reward, number + 1
            tick.success[slot, number] = info.get("success", info.get("is_success", math.nan))
            tick.is_terminated[slot], tick.is_truncated[slot] = is_terminated, is_truncated
        except (TypeError, ValueError, AttributeError) as error:
            right = "(observation, reward, is_terminated, is_truncated, info)"
            raise EnvError(f"step returned {_outline(result)}, not {right}: {error}") from error
        self._film(slot, observation, tick)
        return is_terminated or is_truncated

    def _complete(self, slot: int, observation: Any) -> Any:
        """The observation with its images."""
        if not self._images_on_demand or self.spaces.images.keys() <= observation.keys():
            return observation
        env: Any = self._envs[slot].unwrapped
        return env.with_images(observation)

    def _begin(self, slot: int, observation: Any, tick: Tick) -> None:
        """Store the first observation of an episode, with its instruction."""
        self._observe(slot, observation, tick)
        if self._has_instruction:
            tick.instructions[slot] = observation.get("instruction")
            if not isinstance(tick.instructions[slot], str):
                raise self._misfit(observation)

    def _observe(self, slot: int, observation: Any, tick: Tick) -> None:
        """Store an observation. Raises EnvError if it does not fit its space."""
        try:
            observation = self._complete(slot, observation)
            for name, shape in self.spaces.images.items():
                image = observation[name] if self._is_dict else observation
                kept = tick.observations[name]
                if image.shape != shape or image.dtype != kept.dtype:
                    raise self._misfit(observation)
                kept[slot] = image
            if self._state is not None:
                state = self._flat(observation)
                shape = state.shape if hasattr(state, "shape") else np.shape(state)
                if shape != (self.spaces.state_size,):  # numpy would repeat a single number
                    raise self._misfit(observation)
                tick.observations["state"][slot] = state
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise self._misfit(observation) from error

    def _misfit(self, observation: Any) -> EnvError:
        return EnvError(
            f"the observation {_outline(observation)} does not fit its space "
            f"{_outline(self._observation_space)}"
        )

    def _film(self, slot: int, observation: Any, tick: Tick) -> None:
        if slot in self._filmed:
            self._add_frame(slot, self._picture(self._complete(slot, observation), self._envs[slot]), tick)

    def _picture(self, observation: Any, env: Any) -> Any:
        """The first image of an observation, or else what the environment renders; None if it renders
        nothing."""
        for name in self.spaces.images:
            return observation[name] if self._is_dict else observation
        return env.render() if env.render_mode == "rgb_array" else None

    def _add_frame(self, slot: int, frame: Any, tick: Tick) -> None:
        if not (isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3):
            raise EnvError("no picture for env.video: set env.kwargs.render_mode=rgb_array, or save to false")
        tick.frames.setdefault(slot, []).append(frame[..., :3])


def _each(tick: Tick, slots: Iterable[int], call: Callable[[int], Any]) -> dict[int, Any]:
    """The results of a call for each slot. An exception is a failure of that slot only."""
    results: dict[int, Any] = {}
    for slot in slots:
        try:
            results[slot] = call(slot)
        except BaseException as error:
            if not is_the_users(error):
                raise
            tick.failures[slot] = str(as_env_error(error))
    return results


def check_finite(slots: Collection[int], tick: Tick) -> None:
    """Rewards or observations that are not finite are failures of their slots."""
    for name, values in (("reward", tick.rewards), ("observation", tick.observations.get("state"))):
        if values is None or (abs(values) < np.inf).all():  # of arrays and tensors
            continue
        for slot in slots:
            if slot not in tick.failures and not np.isfinite(as_array(values[slot])).all():
                tick.failures[slot] = f"the {name} {as_array(values[slot])} is not finite"


def _outline(value: Any) -> str:
    """The types and shapes of a value, or of a space's values."""
    if isinstance(value, spaces.Text):
        return "str"
    if isinstance(value, spaces.Dict | spaces.Tuple):
        value = value.spaces
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_outline(part)}" for name, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_outline, value)) + ")"
    if isinstance(value, spaces.Space) and not isinstance(value, spaces.Box):
        return str(value)
    return f"{value.dtype} {value.shape}" if hasattr(value, "dtype") else type(value).__name__


def _flat(space: spaces.Space | None, observation: Any) -> NDArray[Any]:
    """The vector of an observation. Raises ValueError if it does not fit its space."""
    assert space is not None, "there is a state"
    if isinstance(space, spaces.Dict):
        observation = {name: observation[name] for name in space.spaces}
    if not _fits(space, observation):
        raise ValueError
    return np.asarray(spaces.flatten(space, observation))


def _fits(space: spaces.Space, value: Any) -> bool:
    """Like `contains`, but the numbers of a Box may be out of its bounds, or of another type."""
    if isinstance(space, spaces.Dict):
        return all(_fits(part_space, value[name]) for name, part_space in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return all(_fits(part_space, part) for part_space, part in zip(space.spaces, value, strict=True))
    return np.shape(value) == space.shape if isinstance(space, spaces.Box) else space.contains(value)


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
    if hasattr(env.unwrapped, "images_on_demand"):
        env.unwrapped.images_on_demand = True  # pyright: ignore[reportAttributeAccessIssue]
    return (
        env if rules == EpisodeRules(limit, rescale_actions=rules.rescale_actions) else RuledEnv(env, rules)
    )


def make_env(registered: Callable[..., Any], env_id: str, kwargs: Mapping[str, Any], base_dir: Path) -> Any:
    """What `registered` (gymnasium.make), or a class or function of the user's own, makes. Raises
    ConfigError."""
    try:
        if _is_path(env_id):
            return load_function(env_id, base_dir=base_dir, key="env.id", allows_class=True)(**kwargs)
        return registered(env_id, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise refused("id", f"{env_id} needs a package that is not installed: {error}") from error
    except gymnasium.error.Error as error:
        near = suggest(env_id, gymnasium.registry)
        raise refused("id", f"Gymnasium cannot make {env_id!r}{near}: {error}") from error
    except ModuleNotFoundError as error:
        raise refused("id", f"{env_id} needs a module that is not installed: {error}") from error
    except TypeError as error:
        raise refused("kwargs", f"{env_id} does not accept {dict(kwargs)}: {error}") from error


def _is_path(env_id: str) -> bool:
    """Whether this is the path of a class or function; module:Name-v0 is registered."""
    return ".py:" in env_id or ("." in env_id and ":" not in env_id)


def unit_bounds(env_id: str, space: spaces.Space) -> tuple[NDArray, NDArray]:
    """[-1, 1] in the shape of a Box."""
    if not isinstance(space, spaces.Box) or not space.is_bounded():
        raise refused("rescale_actions", f"the actions of {env_id} have no bounds: {space}; set it to false")
    one = np.ones(space.shape, space.dtype)
    return -one, one


def _actions(env_id: str, space: spaces.Space) -> tuple[ActionSpace, Callable[[NDArray], Any]]:
    """The policy's action space, and the conversion of an array of its actions to the environment's."""
    if isinstance(space, spaces.Discrete):
        return ActionSpace("discrete", int(space.n)), lambda actions: (space.start + actions).tolist()
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        size, low, high = int(np.prod(space.shape)), space.low, space.high

        def clipped(actions: NDArray) -> NDArray:
            bounded = np.clip(actions.reshape(*actions.shape[:-1], *space.shape), low, high)
            return bounded.astype(space.dtype, copy=False)

        return ActionSpace("continuous", size), clipped
    raise refused(
        "id", f"unsupported action space of {env_id}: {space}; supported are Discrete, and Box of floats"
    )
