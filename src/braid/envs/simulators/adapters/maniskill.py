"""ManiSkill 3: tasks of robot arms in SAPIEN (Tao et al. 2024, arXiv 2410.00425; package mani-skill)."""

from __future__ import annotations

import string
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from braid.envs.simulators.base import as_array, refused

from .packages import check_known, imported

_IMAGES_NEED = (
    "ManiSkill cannot create its scene: {error}. It needs a Vulkan device, also for observations without "
    "images, since the materials of objects are made by its renderer; run on a machine with a GPU and its "
    "Vulkan driver, or use another environment"
)


_REWARDS: dict[str, dict[str, float]] = {
    "success": {"success": 1.0},
    "put_on": {"is_src_obj_grasped": 0.1, "consecutive_grasp": 0.1, "success": 1.0},
}
"""Own mode of rewards -> share of each of the task's facts. put_on is RLinf's, for tasks that put one object
on another."""


class _Task:
    """A scene of `num_envs` copies of a task, its rewards, and its observations: the colour images of all
    cameras, by their names; everything else is `state` [..., N]. They are tensors on the scene's device."""

    def __init__(
        self,
        task: str,
        num_envs: int,
        *,
        render_mode: str | None,
        gripper: str = "signed",
        reward_mode: str | None = None,
        **options: Any,
    ) -> None:
        """Raises ConfigError if ManiSkill, the task, its assets or a renderer is missing."""
        spec = _spec(task)
        self.limit: int | None = spec.max_episode_steps
        mode = options.get("obs_mode") or spec.cls.SUPPORTED_OBS_MODES[0]
        has_images = render_mode is not None or not mode.startswith("state")
        self._reward = reward_mode if reward_mode in _REWARDS else None
        if reward_mode is not None and self._reward is None:
            options["reward_mode"] = reward_mode
        env_options = {
            "render_backend": "gpu" if has_images else "none",
            "render_mode": render_mode,
        } | options
        try:
            self.env = spec.cls(**(spec.default_kwargs | {"num_envs": num_envs} | env_options))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            is_device = any(word in str(error) for word in ("render", "device", "vk::", "Vulkan"))
            why = (
                _IMAGES_NEED.format(error=error)
                if is_device
                else f"{task} does not accept {env_options}: {error}"
            )
            raise refused("kind" if is_device else "kwargs", why) from error
        self._opens_above = 0.5 if gripper == "open_is_one" else None
        self.instruction = getattr(self.env, "get_language_instruction", None)
        observation = self.observed(self.env._init_raw_obs, [""] * num_envs)
        observation_spaces: dict[str, spaces.Space] = {
            name: spaces.Box(0, 255, tuple(values.shape[1:]), np.uint8)
            for name, values in observation.items()
            if name not in ("state", "instruction")
        }
        if "state" in observation:
            observation_spaces["state"] = spaces.Box(
                -np.inf, np.inf, tuple(observation["state"].shape[1:]), np.float32
            )
        if self.instruction is not None:
            observation_spaces["instruction"] = spaces.Text(200, charset=string.printable)
        self.observation_space = spaces.Dict(observation_spaces)
        self.action_space = self.env.single_action_space

    def step(self, actions: NDArray[np.float32]) -> Any:
        """See BaseEnv.step; the last number of the actions [..., A] as config.rollout.ManiskillEnv says."""
        if self._opens_above is not None:
            opens = np.where(actions[..., -1:] > self._opens_above, 1.0, -1.0)
            actions = np.concatenate([actions[..., :-1], opens], axis=-1, dtype=np.float32)
        observation, reward, is_terminated, is_truncated, info = self.env.step(actions)
        if self._reward is not None:
            parts = _REWARDS[self._reward]
            if missing := [name for name in parts if name not in info]:
                why = (
                    f"{self._reward} needs {missing[0]} of the task, which has {', '.join(info)}; use another"
                )
                raise refused("reward_mode", why)
            reward = sum(share * info[name].float() for name, share in parts.items())
        return observation, reward, is_terminated, is_truncated, info

    def instructions(self) -> list[str]:
        """Of the running episodes."""
        return [] if self.instruction is None else list(self.instruction())

    def observed(self, observation: Any, instructions: list[str]) -> dict[str, Any]:
        """Batched over environments."""
        parts: dict[str, Any] = {}
        if isinstance(observation, Mapping):
            parts = {
                name: data["rgb"]
                for name, data in observation.get("sensor_data", {}).items()
                if "rgb" in data
            }
            observation = [observation[name] for name in ("agent", "extra") if name in observation]
        if states := [part.reshape(len(part), -1).float() for part in _leaves(observation)]:
            parts["state"] = import_module("torch").cat(states, dim=-1)
        if self.instruction is not None:
            parts["instruction"] = tuple(instructions)
        return parts


class ManiSkill(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """One environment, simulated on the CPU."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's

    def __init__(
        self,
        task: str,
        *,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        """`max_episode_steps`: the task's own limit when None; `options`: as ManiSkill's environments have
        them. Raises ConfigError like _Task."""
        self._task = _Task(task, 1, sim_backend="physx_cpu", render_mode=render_mode, **options)
        self._limit = max_episode_steps or self._task.limit
        self.observation_space = self._task.observation_space
        self.action_space = self._task.action_space
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG002
        super().reset(seed=seed)
        observation, info = self._task.env.reset(seed=seed)
        self._said = self._task.instructions()
        return self._first(observation), {"success": bool(info["success"][0])} if "success" in info else {}

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        env = self._task.env
        observation, reward, is_terminated, _, info = self._task.step(action)
        is_late = self._limit is not None and int(env.elapsed_steps[0]) >= self._limit
        said = {"success": bool(info["success"][0])} if "success" in info else {}
        is_over = bool(is_terminated[0])
        return self._first(observation), float(reward[0]), is_over, is_late and not is_over, said

    def render(self) -> NDArray[np.uint8]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return as_array(self._task.env.render()[0])

    def close(self) -> None:
        self._task.env.close()

    def _first(self, observation: Any) -> dict[str, Any]:
        return {
            name: as_array(batch[0]) for name, batch in self._task.observed(observation, self._said).items()
        }


class ManiSkillBatch(gymnasium.vector.VectorEnv[dict[str, Any], Any, Any]):
    """`num_envs` environments in one scene, simulated on a GPU. An ended episode waits for its reset.

    A scene that resets several environments draws all their states from the first one's seed, so that they
    would depend on which others are reset. Here they are reset one by one. Observations, rewards and ends are
    tensors on the GPU.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(
        self,
        task: str,
        *,
        num_envs: int,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        sim_backend: str = "physx_cuda",
        ignore_terminations: bool = False,
        **options: Any,
    ) -> None:
        """See ManiSkill. With `ignore_terminations` only the time limit ends an episode."""
        self._goes_on = ignore_terminations
        self._task = _Task(task, num_envs, sim_backend=sim_backend, render_mode=render_mode, **options)
        self._limit = max_episode_steps or self._task.limit
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space = self._task.observation_space
        self.single_action_space = self._task.action_space
        self.action_space = self._task.env.action_space
        self._said = [""] * num_envs

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """`seed`: a list of one per environment; those outside options.reset_mask [num_envs] go on."""
        torch, env = import_module("torch"), self._task.env
        observation: Any = None
        for slot in np.flatnonzero((options or {}).get("reset_mask", np.ones(self.num_envs, bool))):
            only = {"env_idx": torch.tensor([slot], device=env.device)}
            observation, _ = env.reset(seed=[seed[slot]] * self.num_envs, options=only)
            if said := self._task.instructions():
                self._said[slot] = said[slot]
        return self._task.observed(observation, self._said), {}

    def step(self, actions: Any) -> tuple[dict[str, Any], Any, Any, Any, dict[str, Any]]:
        env = self._task.env
        observation, reward, is_terminated, _, info = self._task.step(actions)
        is_terminated = is_terminated & (not self._goes_on)
        is_late = env.elapsed_steps >= (np.inf if self._limit is None else self._limit)
        said = {"success": info["success"]} if "success" in info else {}
        parts = self._task.observed(observation, self._said)
        return parts, reward, is_terminated, is_late & ~is_terminated, said

    def render(self) -> Any:
        return tuple(as_array(self._task.env.render()))

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002
        self._task.env.close()


def _spec(task: str) -> Any:
    """Registration of a task whose assets are there."""
    _, registration, assets = (
        imported(f"mani_skill.{module}", "ManiSkill", "maniskill")
        for module in ("envs", "utils.registration", "utils.assets")
    )
    known = registration.REGISTERED_ENVS
    check_known("ManiSkill", "task", task, known, "task")
    for name in assets.expand_data_group_into_individual_data_source_ids(task):
        if not assets.is_data_source_downloaded(name):
            source = assets.DATA_SOURCES[name]
            where = source.output_dir / source.target_path
            fix = f"run: python -m mani_skill.utils.download_asset {name}"
            raise refused("task", f"{task} needs the assets {name}, which are not in {where}; {fix}")
    return known[task]


def _leaves(value: Any) -> list[Any]:
    """The tensors of nested dicts and lists, in their order."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]
