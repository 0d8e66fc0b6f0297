"""LIBERO's tables, initial states and shapes, from its wheel; its episodes need assets that it lacks."""

from __future__ import annotations

import numpy as np
import pytest
from tests.needs import needs

from braid.envs.kinds import LiberoEnv
from braid.envs.simulators.adapters import libero
from braid.envs.simulators.adapters.libero import CAMERAS, Libero, axis_angle, tasks
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.errors import ConfigError
from braid.types import ActionSpace, Spaces

with_libero = needs("libero")


@with_libero
@pytest.mark.parametrize(
    ("suite", "count"),
    [
        ("libero_spatial", 10),
        ("libero_object", 10),
        ("libero_goal", 10),
        ("libero_10", 10),
        ("libero_90", 90),
    ],
)
def test_a_suite_has_its_tasks_with_an_instruction_a_file_and_fifty_initial_states(
    suite: str, count: int
) -> None:
    suite_tasks = tasks(suite)
    assert len(suite_tasks) == count
    for task in suite_tasks:
        assert task.bddl.is_file()
        assert task.instruction.replace(" ", "_") in task.name
        assert "SCENE" not in task.instruction
        assert len(task.states()) == 50
        assert task.states().ndim == 2


@with_libero
def test_all_suites_together_have_130_tasks() -> None:
    assert len({task.name for task in tasks("libero_130")}) == 130


@with_libero
def test_missing_assets_are_named_with_their_folder() -> None:
    with pytest.raises(ConfigError, match=r"env\.kind: LIBERO's assets are not in /.*/libero/assets"):
        Libero("libero_10")


@with_libero
def test_spaces_and_reset_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the simulation."""
    monkeypatch.setattr(libero, "_check_assets", lambda: None)
    env = LiberoEnv(kind="libero", suite="libero_goal", task_ids=(1, 4), camera_height=32, camera_width=48)
    made = env.made_by
    simulator = GymnasiumSimulator(made.id, 1, made.kwargs, rules=env.rules())
    assert simulator.spaces == Spaces(8, ActionSpace("continuous", 7), dict.fromkeys(CAMERAS, (32, 48, 3)))
    made = Libero("libero_goal", task_ids=(1, 4))
    assert [task.name for task in made.tasks] == [tasks("libero_goal")[i].name for i in (1, 4)]
    assert made._ends.tolist() == [50, 100]
    with pytest.raises(ConfigError, match=r"env\.task_ids: libero_goal has 10 tasks, from 0 to 9"):
        Libero("libero_goal", task_ids=[10])


class _Simulation:
    """Records actions in place of LIBERO's simulation."""

    def __init__(self, *_: object) -> None:
        self.actions: list[list[float]] = []

    def seed(self, _: int) -> None: ...

    def reset(self) -> None: ...

    def set_init_state(self, _: object) -> dict[str, np.ndarray]:
        return {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, dict[str, object]]:
        self.actions.append(action.tolist())
        image, vector = np.zeros((2, 2, 3), np.uint8), np.array([0.0, 0.0, 0.0, 1.0])
        images = {f"{camera}_image": image for camera in CAMERAS.values()}
        state = {"robot0_eef_pos": vector[:3], "robot0_eef_quat": vector, "robot0_gripper_qpos": vector[:2]}
        return images | state, 0.0, False, {}

    def close(self) -> None: ...


@with_libero
@pytest.mark.parametrize(("opens", "last"), [(True, -1.0), (False, 0.0)])
def test_the_gripper_may_be_opened_before_an_episode(
    monkeypatch: pytest.MonkeyPatch, opens: bool, last: float
) -> None:
    monkeypatch.setattr(libero, "_check_assets", lambda: None)
    monkeypatch.setattr(libero, "_simulation", _Simulation)
    made = LiberoEnv(kind="libero", open_gripper=opens).made_by
    env = Libero(**{name: value for name, value in made.kwargs.items() if name != "video"})
    env.reset(seed=0)
    assert env._env.actions == [[0.0] * 6 + [last]] * 10


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libero, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"env\.kind: LIBERO is not installed; run: pip install"):
        tasks("libero_10")


@pytest.mark.parametrize(("axis", "angle"), [((1, 0, 0), 0.5), ((0, 0.6, 0.8), 3.0), ((0, 0, 1), 0.0)])
def test_rotations_are_an_axis_times_an_angle(axis: tuple[float, ...], angle: float) -> None:
    quaternion = np.array([*(np.array(axis) * np.sin(angle / 2)), np.cos(angle / 2)])
    np.testing.assert_allclose(axis_angle(quaternion), np.array(axis) * angle, atol=1e-12)
