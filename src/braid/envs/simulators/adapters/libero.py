"""LIBERO: 130 language-conditioned tasks of a Panda arm in MuJoCo (Liu et al. 2023, arXiv 2306.03310; package
hf-libero).

Tasks, instructions and initial states are read from the package's files, without importing it: that would ask
questions on the terminal. Episodes need the assets (meshes, textures, scenes), which the package downloads
from the Hub.
"""

from __future__ import annotations

import os
import re
import runpy
import string
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import yaml
from gymnasium import spaces
from numpy.typing import NDArray

from braid.envs.simulators.base import refused

from .packages import imported, not_installed

_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
CAMERAS = {"image": "agentview", "wrist_image": "robot0_eye_in_hand"}
"""Image of the observations -> camera."""
STATE_SIZE = 8
"""Position of the gripper, its orientation as axis times angle, and the positions of its two fingers."""
_WAIT, _OPEN = np.zeros(7), np.array([0.0] * 6 + [-1.0])
"""Actions that move nothing; the second opens the gripper."""
_NUM_WAITS = 10
"""Env steps before an episode, in which objects fall into place (OpenVLA's evaluation)."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task, its file of objects and goals, and that of its initial states [50, N], MuJoCo's time, positions
    and velocities."""

    name: str
    instruction: str
    bddl: Path
    init_states: Path

    def states(self) -> NDArray[np.float64]:
        return np.asarray(torch.load(self.init_states, weights_only=False))


def tasks(suite: str) -> list[Task]:
    """The tasks of a suite, in the package's order; libero_130 has those of all suites. Raises ConfigError if
    LIBERO is not installed."""
    folder = _folder()
    table = runpy.run_path(str(folder / "benchmark" / "libero_suite_task_map.py"))["libero_task_map"]
    return [
        Task(
            name,
            re.sub(r"^[A-Z]+(_[A-Z]+)*_SCENE\d+_", "", name).replace("_", " "),
            folder / "bddl_files" / part / f"{name}.bddl",
            folder / "init_files" / part / f"{name}.pruned_init",
        )
        for part in (_SUITES if suite == "libero_130" else (suite,))
        for name in table[part]
    ]


class Libero(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """The tasks of a suite, which share their spaces. The seed of a reset is the number of its initial state,
    modulo their number, counted through all tasks."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012  # Gymnasium's

    def __init__(
        self,
        suite: str,
        *,
        task_ids: Sequence[int] | None = None,
        camera_height: int = 256,
        camera_width: int = 256,
        max_episode_steps: int = 512,
        gripper: str = "signed",
        open_gripper: bool = True,
    ) -> None:
        """`gripper`, `open_gripper`: see config.env.LiberoEnv. Raises ConfigError for a missing package or
        missing assets."""
        known = tasks(suite)
        if wrong := [number for number in task_ids or () if number >= len(known)]:
            why = (
                f"{suite} has {len(known)} tasks, from 0 to {len(known) - 1}, so there is no task {wrong[0]}"
            )
            raise refused("task_ids", why)
        self.tasks = known if task_ids is None else [known[number] for number in task_ids]
        _check_assets()
        self._sizes = {"camera_heights": camera_height, "camera_widths": camera_width}
        self._limit, self._gripper = max_episode_steps, gripper
        self._wait = _OPEN if open_gripper else _WAIT
        self._states = [task.states() for task in self.tasks]
        self._ends = np.cumsum([len(states) for states in self._states])
        self._env: Any = None
        self._task: int | None = None
        observation_spaces: dict[str, spaces.Space] = dict.fromkeys(
            CAMERAS, spaces.Box(0, 255, (camera_height, camera_width, 3), np.uint8)
        )
        observation_spaces["state"] = spaces.Box(-np.inf, np.inf, (STATE_SIZE,), np.float32)
        observation_spaces["instruction"] = spaces.Text(200, charset=string.printable)
        self.observation_space = spaces.Dict(observation_spaces)
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG002
        super().reset(seed=seed)
        number = int(self.np_random.integers(self._ends[-1]) if seed is None else seed % self._ends[-1])
        task = int(np.searchsorted(self._ends, number, side="right"))
        if task != self._task:
            self.close()
            self._env, self._task = _simulation(self.tasks[task], self._sizes), task
        self._env.seed(0)
        self._env.reset()
        observation = self._env.set_init_state(self._states[task][number - self._ends[task]])
        for _ in range(_NUM_WAITS):
            observation, *_ = self._env.step(self._wait)
        self._count = 0
        return self._observed(observation), {"success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        if self._gripper == "open_is_one":
            action = np.append(action[:-1], 1.0 if action[-1] < 0.5 else -1.0)
        observation, reward, _, _ = self._env.step(action)
        self._count += 1
        is_success = bool(self._env.check_success())
        is_late = self._count >= self._limit and not is_success
        return self._observed(observation), float(reward), is_success, is_late, {"success": is_success}

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = self._task = None

    def _observed(self, observation: dict[str, Any]) -> dict[str, Any]:
        assert self._task is not None, "reset comes first"
        images = {name: observation[f"{camera}_image"][::-1, ::-1] for name, camera in CAMERAS.items()}
        state = (
            observation["robot0_eef_pos"],
            axis_angle(observation["robot0_eef_quat"]),
            observation["robot0_gripper_qpos"],
        )
        return {
            **images,
            "state": np.concatenate(state, dtype=np.float32),
            "instruction": self.tasks[self._task].instruction,
        }


def axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation (x, y, z, w) as its axis times its angle [3], in radians from 0 to 2 pi."""
    cosine = np.clip(quaternion[3], -1.0, 1.0)
    sine = np.sqrt(1.0 - cosine**2)
    return np.zeros(3) if np.isclose(sine, 0.0) else quaternion[:3] * 2.0 * np.arccos(cosine) / sine


def _simulation(task: Task, sizes: dict[str, int]) -> Any:
    folder = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero"))
    if not (folder / "config.yaml").exists():  # without it the import asks for one on the terminal
        root = _folder()
        paths = {"benchmark_root": ".", "bddl_files": "bddl_files", "init_states": "init_files"}
        paths |= {"datasets": "../datasets", "assets": "assets"}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(
            yaml.safe_dump({key: str(root / folder_name) for key, folder_name in paths.items()})
        )
    wrapper = imported("libero.libero.envs", "LIBERO", "libero").OffScreenRenderEnv
    return wrapper(bddl_file_name=str(task.bddl), **sizes)


def _folder() -> Path:
    """The package's folder of tasks."""
    spec = find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise not_installed("LIBERO", "libero")
    return Path(next(iter(spec.submodule_search_locations))) / "libero"


def _check_assets() -> None:
    folder = _folder() / "assets"
    if not folder.is_dir():
        why = (
            f"LIBERO's assets are not in {folder}; put a copy of its folder of meshes, textures and scenes "
            "there (its package downloads them from the Hub: python -c 'from libero.libero import "
            "get_assets_path as g; print(g())')"
        )
        raise refused("kind", why)
