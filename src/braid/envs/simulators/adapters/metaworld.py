"""MetaWorld: 50 tasks of a Sawyer arm in MuJoCo (Yu et al. 2019; package metaworld, version 3)."""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from braid.envs.simulators.base import refused

from .packages import check_known, imported

_PROPRIOCEPTION = 4
"""The first numbers of a state: position and opening of the gripper."""


class MetaWorld(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """One task, such as reach-v3, or a set of them, such as MT50. The seed of a reset alone decides the task,
    and the places of objects and goal, drawn from the same ranges as the 50 fixed goals of MetaWorld's own
    benchmarks. A reset to another task loads its scene, which takes about a second.

    Without cameras the state is MetaWorld's observation [39], goal included; with cameras only the gripper's
    position and opening [4], as policies with images have it in LeRobot and RLinf.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012  # Gymnasium's

    def __init__(  # noqa: PLR0913  # a config section's keys
        self,
        task: str,
        *,
        instruction: str | None = None,
        max_episode_steps: int = 500,
        terminate_on_success: bool = False,
        reward_mode: str = "dense",
        cameras: Mapping[str, str] | None = None,
        image_size: int = 64,
        shadows: bool = False,
        render_mode: str | None = None,
    ) -> None:
        """`reward_mode`: see config.env.MetaworldEnv. `instruction`: the task's name in words when None.
        `cameras`: name of the image -> MetaWorld's camera (corner, corner2, corner3, corner4, topview,
        behindGripper, gripperPOV). Without `shadows`, reflections, sky and antialiasing are left out too,
        which on a CPU is twelve times as fast. Raises ConfigError if there are cameras, or `render_mode` is
        rgb_array, and OpenGL does not work."""
        try:
            tables = imported("metaworld.env_dict", "MetaWorld", "metaworld")
        except (RuntimeError, AttributeError, OSError) as error:  # of the library that MUJOCO_GL names
            why = f"MuJoCo cannot be imported with MUJOCO_GL={os.environ.get('MUJOCO_GL', '')}: {error}"
            raise refused("kind", f"{why}; {_REMEDY}, or remove MUJOCO_GL") from error
        self._known, self._limit, self._said = tables.ALL_V3_ENVIRONMENTS, max_episode_steps, instruction
        sets = _sets(tables)
        check_known("MetaWorld", "task", task, {**self._known, **sets}, "task")
        self._tasks = sets.get(task, [task])
        self._ends, self._is_sparse = terminate_on_success, reward_mode == "success"
        self._cameras, self._size, self._shadows = dict(cameras or {}), image_size, shadows
        self._renderer: _Renderer | None = None
        self._load(self._tasks[0])
        self.render_mode = render_mode
        self.images_on_demand = False
        """Leave images out of observations, for `with_images` to add."""
        size = _PROPRIOCEPTION if self._cameras else 39
        observation_spaces: dict[str, spaces.Space] = dict.fromkeys(
            self._cameras, spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        )
        observation_spaces["state"] = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        observation_spaces["instruction"] = spaces.Text(200, charset=string.printable)
        self.observation_space = spaces.Dict(observation_spaces)
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        for camera in self._cameras.values():
            self._image(camera)
        if render_mode == "rgb_array" and not self._cameras:
            _try_opengl()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG002
        super().reset(seed=seed)
        if len(self._tasks) > 1:
            number = int(self.np_random.integers(2**32)) if seed is None else seed
            task = self._tasks[number % len(self._tasks)]
            if task != self._task:
                self.close()
                self._load(task)
        self._env.np_random = self.np_random
        return self._observed(self._env.reset()[0]), {"success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        observation, reward, _, is_truncated, info = self._env.step(action)
        is_success = bool(info["success"])
        is_terminated = self._ends and is_success
        return (
            self._observed(observation),
            float(is_success if self._is_sparse else reward),
            is_terminated,
            bool(is_truncated) and not is_terminated,
            {**info, "success": is_success},
        )

    def with_images(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The observation of the present state, with what the cameras see."""
        return {name: self._image(camera) for name, camera in self._cameras.items()} | observation

    def render(self) -> NDArray[np.uint8]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The image of the first camera, or of MetaWorld's corner4."""
        return self._image(next(iter(self._cameras.values()), "corner4"))

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._env.close()

    def _load(self, task: str) -> None:
        """Make the simulation of a task."""
        env = self._env = self._known[task]()
        # As in its goal-observable classes, but with goals from the environment's own seeded generator.
        env._partially_observable = env._freeze_rand_vec = False
        env._set_task_called = env.seeded_rand_vec = True
        del env.sawyer_observation_space  # cached for a hidden goal
        env.max_path_length = self._limit
        self._task, self._instruction = task, self._said or task.removesuffix("-v3").replace("-", " ")

    def _observed(self, observation: NDArray[np.float64]) -> dict[str, Any]:
        state = observation[:_PROPRIOCEPTION] if self._cameras else observation
        parts = {"state": state.astype(np.float32), "instruction": self._instruction}
        return parts if self.images_on_demand else self.with_images(parts)

    def _image(self, camera: str) -> NDArray[np.uint8]:
        if self._renderer is None:
            self._renderer = _Renderer(self._env, self._size, shadows=self._shadows)
        return self._renderer.image(camera)


def _sets(tables: Any) -> dict[str, list[str]]:
    """Name -> tasks of MetaWorld's sets."""
    sets = {f"MT{count}": list(getattr(tables, f"MT{count}_V3")) for count in (10, 25, 50)}
    for count in (10, 25, 45):
        both = getattr(tables, f"ML{count}_V3")
        sets |= {f"ML{count}-{part}": list(both[part]) for part in ("train", "test")}
    return sets


class _Renderer:
    """Images of a MuJoCo model, by EGL unless MUJOCO_GL names another (osmesa, glfw).

    mujoco.Renderer chooses the library when mujoco is imported, and fails then if it is missing, even without
    images.
    """

    def __init__(self, env: Any, size: int, *, shadows: bool) -> None:
        self._mujoco, self._env = import_module("mujoco"), env
        mujoco = self._mujoco
        model = env.model
        self._cameras = [model.camera(i).name for i in range(model.ncam)]
        if not shadows:  # before the context is made, which renders the shadow map's 4096^2 pixels otherwise
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        self._context, self._mujoco_context = _contexts(mujoco, model, size, "cameras")
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._mujoco_context)
        self._scene = mujoco.MjvScene(model, 1000)
        if not shadows:
            flags = mujoco.mjtRndFlag
            for flag in (flags.mjRND_SHADOW, flags.mjRND_REFLECTION, flags.mjRND_SKYBOX, flags.mjRND_FOG):
                self._scene.flags[flag] = 0
        self._option, self._perturbation = mujoco.MjvOption(), mujoco.MjvPerturb()
        self._camera, self._rect = mujoco.MjvCamera(), mujoco.MjrRect(0, 0, size, size)
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def image(self, camera: str) -> NDArray[np.uint8]:
        """[size, size, 3], upright: the corner cameras of MetaWorld are upside down."""
        mujoco = self._mujoco
        check_known("MetaWorld", "camera", camera, self._cameras, "cameras")
        self._camera.fixedcamid = self._cameras.index(camera)
        self._context.make_current()
        mujoco.mjv_updateScene(
            self._env.model,
            self._env.data,
            self._option,
            self._perturbation,
            self._camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self._scene,
        )
        mujoco.mjr_render(self._rect, self._scene, self._mujoco_context)
        image = np.empty((self._rect.height, self._rect.width, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, self._rect, self._mujoco_context)
        is_turned = camera.startswith("corner")  # and OpenGL begins with the lowest line
        return np.ascontiguousarray(image[:, ::-1] if is_turned else image[::-1])

    def close(self) -> None:
        self._context.make_current()
        self._mujoco_context.free()
        self._context.free()


_REMEDY = "install libegl1 and a driver or Mesa, or libosmesa6 and set MUJOCO_GL=osmesa"
_INSTEAD = {"cameras": "remove the cameras", "video": "remove env.video"}
"""Key of the section env that needs images -> how to do without them."""


@cache
def _try_opengl() -> None:
    """Raise ConfigError if this process cannot render. An environment's own contexts take a third of a second
    and 50 MB, so that they are made only for the episodes that are filmed."""
    mujoco = import_module("mujoco")
    context, mujoco_context = _contexts(mujoco, mujoco.MjModel.from_xml_string("<mujoco/>"), 16, "video")
    mujoco_context.free()
    context.free()


def _contexts(mujoco: Any, model: Any, size: int, key: str) -> tuple[Any, Any]:
    """OpenGL's context and MuJoCo's."""
    backend = os.environ.get("MUJOCO_GL", "egl")
    try:
        context = import_module(f"mujoco.{backend}").GLContext(size, size)
        context.make_current()
        return context, mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
    except Exception as error:
        why = f"no images: OpenGL by {backend} does not work here ({type(error).__name__}: {error})"
        raise refused(key, f"{why}; {_REMEDY}, or {_INSTEAD[key]}") from error
