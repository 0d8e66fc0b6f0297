"""robosuite: manipulation tasks of several robots in MuJoCo (Zhu et al. 2020, arXiv 2009.12293; package
robosuite, 1.5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from braid.envs.simulators.base import refused

from .packages import check_known, imported


class Robosuite(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """One task, such as Lift. The seed of a reset alone decides the places of objects: robosuite draws them
    from numpy's global generator, which has the seed during a reset, and its own state again after it.

    The state [N] is the robots' and, without cameras, the objects'. Rewards are dense.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012  # Gymnasium's

    def __init__(
        self,
        task: str,
        *,
        robots: Sequence[str] = ("Panda",),
        max_episode_steps: int = 200,
        cameras: Mapping[str, str] | None = None,
        camera_height: int = 128,
        camera_width: int = 128,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`cameras`: name of the image -> robosuite's camera (agentview, frontview, robot0_eye_in_hand, ...).
        Raises ConfigError for a missing package, task, robot or camera."""
        robosuite = imported("robosuite", "robosuite", "robosuite")
        check_known("robosuite", "task", task, robosuite.ALL_ENVIRONMENTS, "task")
        for robot in robots:
            check_known("robosuite", "robot", robot, robosuite.ALL_ROBOTS, "robots")
        self._cameras, self._limit = dict(cameras or {}), max_episode_steps
        env_options: dict[str, Any] = {
            "has_offscreen_renderer": bool(self._cameras),
            "use_camera_obs": bool(self._cameras),
            "use_object_obs": not self._cameras,
            "reward_shaping": True,
            "ignore_done": True,
        }
        if cameras:
            env_options["camera_names"] = list(cameras.values())
            env_options |= {"camera_heights": camera_height, "camera_widths": camera_width}
        env_options |= kwargs or {}
        try:
            with _seeded(0):
                self._env = robosuite.make(task, robots=list(robots), has_renderer=False, **env_options)
                parts = self._observed(self._env.reset())
        except (TypeError, ValueError, ImportError) as error:
            why = f"{task} does not accept {env_options}: {error}"
            raise refused("cameras" if cameras else "kwargs", why) from error
        self.observation_space = spaces.Dict(
            {
                name: spaces.Box(0, 255, values.shape, np.uint8)
                if name in self._cameras
                else spaces.Box(-np.inf, np.inf, values.shape, np.float32)
                for name, values in parts.items()
            }
        )
        self.action_space = spaces.Box(*(bound.astype(np.float32) for bound in self._env.action_spec))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG002
        super().reset(seed=seed)
        with _seeded(seed):
            observation = self._env.reset()
        self._count = 0
        return self._observed(observation), {"success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        observation, reward, _, _ = self._env.step(action)
        self._count += 1
        said = {"success": bool(self._env._check_success())}
        return self._observed(observation), float(reward), False, self._count >= self._limit, said

    def close(self) -> None:
        self._env.close()

    def _observed(self, observation: Mapping[str, NDArray]) -> dict[str, Any]:
        """Images come upside down, as OpenGL has them."""
        images = {
            name: np.ascontiguousarray(observation[f"{camera}_image"][::-1])
            for name, camera in self._cameras.items()
        }
        states = [
            values
            for name, values in observation.items()
            if name.endswith(("_proprio-state", "object-state"))
        ]
        return {**images, "state": np.concatenate(states, dtype=np.float32)}


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """numpy's global generator with a seed, and afterwards as before."""
    state = np.random.get_state()  # noqa: NPY002  # robosuite's own
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
