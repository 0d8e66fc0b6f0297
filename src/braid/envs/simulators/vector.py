"""A Gymnasium VectorEnv as a simulator: environments that step together, such as those of one scene on a
GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import RescaleAction
from numpy.typing import NDArray

from braid.errors import BraidError, ConfigError, EnvError
from braid.users import as_env_error, is_the_users

from .base import AS_IT_IS, EpisodeRules, Tick, as_array, refused
from .gymnasium import GymnasiumSimulator, check_finite, make_env, unit_bounds

_SUCCESS = ("success", "is_success")


class VectorSimulator(GymnasiumSimulator):
    """A VectorEnv of `num_envs` environments. See base.Simulator, and GymnasiumSimulator for spaces.

    Its auto-reset mode decides how its ends are read. DISABLED: the environments are reset by `reset_mask`.
    SAME_STEP: the last observation of an episode is in `final_obs`. NEXT_STEP: the step after an end is
    ignored. In the last two, environments reset themselves without a seed, so that episodes begin together
    (`resets_together`), in a reset of all of them with seeds of their own. `step` needs an action for every
    running episode. An exception fails all episodes. Observations that are tensors stay on their device,
    unless they go to another process.
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
        """`env_id` is an id with gymnasium.make_vec, or names what makes a VectorEnv from `num_envs` and
        `kwargs`. Raises ConfigError like GymnasiumSimulator."""
        if rules.ignore_terminations:
            why = (
                "the environments of a VectorEnv end by themselves; set it to false, or env.vectorized to "
                "false"
            )
            raise refused("ignore_terminations", why)
        env_options = {**(kwargs or {}), "num_envs": num_envs}
        self._make_vector = partial(make_env, gymnasium.make_vec, env_id, env_options, base_dir)
        self._env_id, self._rules, self.num_envs, self._filmed = env_id, rules, num_envs, set()
        vector = self._vector = self._new()
        mode = self._mode = vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self.resets_together = mode is not AutoresetMode.DISABLED
        self._read_spaces(env_id, vector.single_observation_space, vector.single_action_space)
        self._is_over = np.ones(num_envs, np.bool_)  # by the environment's own count
        self._steps = np.zeros(num_envs, np.int64)
        self._before = np.zeros(num_envs)

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Tick:
        self._filmed = self._filmed.difference(seeds).union(filmed)
        mask = np.isin(np.arange(self.num_envs), list(seeds))
        options = None if self.resets_together else {"reset_mask": mask}
        tick = Tick.empty(self.num_envs, self.spaces, 0, self.image_memory)
        try:
            each: Any = [seeds.get(slot, 0) for slot in range(self.num_envs)]
            observations, _ = self._vector.reset(seed=each, options=options)
            observations = self._kept(observations, tick)
            self._is_over[mask | self.resets_together] = False
            self._steps[mask], self._before[mask] = 0, 0.0
            for slot in seeds:
                self._begin(slot, self._of(slot, observations), tick)
            self._film_all(seeds, observations, tick)
        except BaseException as error:
            if not is_the_users(error):
                raise
            self._fail(tick, seeds, error)
        check_finite(seeds, tick)
        return tick

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        num_actions = max(map(len, actions.values()), default=0)
        tick = Tick.empty(self.num_envs, self.spaces, num_actions, self.image_memory)
        live = dict(actions)
        try:
            for number in range(num_actions):
                live = self._step_all(number, live, tick)
        except BaseException as error:
            if not is_the_users(error):
                raise
            self._fail(tick, actions, error)
        check_finite(actions, tick)
        return tick

    def close(self) -> None:
        self._vector.close()

    def _step_all(self, number: int, live: Mapping[int, NDArray], tick: Tick) -> dict[int, NDArray]:
        """One env step; returns the actions of the episodes that go on."""
        if not live:
            return {}
        if self._mode is AutoresetMode.DISABLED and self._is_over.any():
            any_seeds: Any = [0] * self.num_envs
            self._vector.reset(seed=any_seeds, options={"reset_mask": self._is_over.copy()})
            self._is_over[:] = False
        slot_actions = {slot: self._to_action(chunk[number]) for slot, chunk in live.items()}
        idle = next(iter(slot_actions.values()))
        batch = np.stack([slot_actions.get(slot, idle) for slot in range(self.num_envs)])
        observations, *of_step, info = self._vector.step(batch)
        observations = self._kept(observations, tick)
        rewards, is_terminated, is_truncated = map(as_array, of_step)
        for name, values, kinds in (
            ("rewards", rewards, "fiub"),
            ("is_terminated", is_terminated, "b"),
            ("is_truncated", is_truncated, "b"),
        ):
            if values.shape != (self.num_envs,) or values.dtype.kind not in kinds:
                what = "booleans" if kinds == "b" else "numbers"
                raise EnvError(
                    f"{name} must be {self.num_envs} {what}, not {values.dtype} of shape {values.shape}"
                )
        info |= {name: as_array(info[name]) for name in _SUCCESS if name in info}
        self._is_over |= is_terminated | is_truncated
        self._steps += 1
        is_late = self._steps >= (self._rules.max_episode_steps or np.inf)
        self._film_all(live, observations, tick)
        on = {}
        for slot, chunk in live.items():
            reward, self._before[slot] = self._rules.reward(float(rewards[slot]), self._before[slot])
            tick.rewards[slot, number], tick.num_executed[slot] = reward, number + 1
            observation, success = self._of(slot, observations), _success(info, slot)
            is_over = is_terminated[slot] or is_truncated[slot]
            if is_over and self._mode is AutoresetMode.SAME_STEP:
                observation, success = info["final_obs"][slot], _success(info["final_info"], slot)
            tick.success[slot, number] = success
            tick.is_terminated[slot] = is_terminated[slot]
            tick.is_truncated[slot] = not is_terminated[slot] and (is_truncated[slot] or is_late[slot])
            self._observe(slot, observation, tick)
            if not (is_over or is_late[slot]):
                on[slot] = chunk
        return on

    def _kept(self, observations: Any, tick: Tick) -> Any:
        """A batch of observations. If they are tensors, those of the tick become tensors on the same device;
        but the batch becomes arrays if it goes to another process, or if its state has several parts."""
        if self.image_memory is not None or not self._is_flat:
            return _on_host(observations)
        batch = {name: observations[name] if self._is_dict else observations for name in self.spaces.images}
        if self._state is not None:
            batch["state"] = self._flat(observations)
        for name, values in batch.items():
            if hasattr(values, "new_zeros") and isinstance(tick.observations[name], np.ndarray):
                zeros = values.new_zeros(tick.observations[name].shape)
                tick.observations[name] = zeros.float() if name == "state" else zeros.byte()
        return observations

    def _of(self, slot: int, batch: Any) -> Any:
        """One environment's part of a batch of observations."""
        return _part(self._vector.single_observation_space, slot, batch)

    def _film_all(self, slots: Collection[int], observations: Any, tick: Tick) -> None:
        if filmed := self._filmed.intersection(slots):
            pictures = self._picture(observations, self._vector)
            for slot in filmed:
                self._add_frame(slot, None if pictures is None else as_array(pictures[slot]), tick)

    def _new(self) -> VectorEnv:
        vector = self._make_vector()
        if not isinstance(vector, VectorEnv):
            why = f"{type(vector).__name__} is not a gymnasium.vector.VectorEnv; set env.vectorized to false"
            raise refused("id", why)
        if self._rules.rescale_actions:
            vector = RescaleAction(vector, *unit_bounds(self._env_id, vector.single_action_space))
        return vector

    def _fail(self, tick: Tick, slots: Collection[int], error: BaseException) -> None:
        """All episodes have failed; a new VectorEnv takes the place of this one."""
        if isinstance(error, ConfigError):
            raise error
        tick.failures.update(dict.fromkeys(slots, str(as_env_error(error))))
        with suppress(Exception):
            self._vector.close()
        self._vector = self._new()
        self._is_over[:] = True


def make_simulator(
    env_id: str,
    num_envs: int,
    kwargs: Mapping[str, Any] | None = None,
    *,
    base_dir: Path = Path(),
    rules: EpisodeRules = AS_IT_IS,
    is_vectorized: bool = False,
) -> GymnasiumSimulator:
    """A simulator in this process. Raises ConfigError like GymnasiumSimulator, and EnvError if the
    environment raises."""
    make = VectorSimulator if is_vectorized else GymnasiumSimulator
    try:
        return make(env_id, num_envs, kwargs, base_dir=base_dir, rules=rules)
    except BraidError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(f"{env_id} cannot be created: {as_env_error(error)}") from error


def _part(space: spaces.Space, slot: int, batch: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _part(part_space, slot, batch[name]) for name, part_space in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(
            _part(part_space, slot, values) for part_space, values in zip(space.spaces, batch, strict=True)
        )
    return batch[slot]


def _on_host(batch: Any) -> Any:
    """A batch of observations as arrays."""
    if isinstance(batch, Mapping):
        return {name: _on_host(part) for name, part in batch.items()}
    return tuple(map(_on_host, batch)) if isinstance(batch, tuple) else as_array(batch)


def _success(info: Mapping[str, Any], slot: int) -> float:
    for name in _SUCCESS:
        if name in info and (f"_{name}" not in info or info[f"_{name}"][slot]):
            return float(info[name][slot])
    return np.nan
