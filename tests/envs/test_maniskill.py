"""ManiSkill on the CPU, with real physics and without a renderer (see maniskill_stub)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.envs.maniskill_stub import has_vulkan, without_renderer
from tests.needs import needs

from braid.envs.kinds import ManiskillEnv
from braid.envs.simulators.adapters.maniskill import ManiSkill, ManiSkillBatch
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.envs.simulators.vector import VectorSimulator
from braid.errors import ConfigError
from braid.types import ActionSpace, Spaces

pytestmark = [
    needs("mani_skill"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Failed to find system libvulkan:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # numpy functions on tensors
]
STATES = {"obs_mode": "state"}


@pytest.fixture
def physics(monkeypatch: pytest.MonkeyPatch) -> None:
    without_renderer(monkeypatch)


@pytest.fixture
def pick_cube(physics: None) -> Iterator[ManiSkill]:
    with closing(ManiSkill("PickCube-v1", **STATES)) as env:
        yield env


def played(env: Any, seed: int) -> list[Any]:
    history = [env.reset(seed=seed)[0]["state"].tobytes()]
    for number in range(20):
        observation, reward, *_ = env.step(np.full(8, np.sin(number), np.float32))
        history += [observation["state"].tobytes(), reward]
    return history


def test_a_seed_and_actions_decide_an_episode(pick_cube: ManiSkill, physics: None) -> None:
    first = played(pick_cube, 5)
    assert played(pick_cube, 6) != first
    assert played(pick_cube, 5) == first, "nothing of the episode before is left"
    with closing(ManiSkill("PickCube-v1", **STATES)) as fresh:
        assert played(fresh, 5) == first


def test_it_is_a_gymnasium_environment(pick_cube: ManiSkill) -> None:
    assert pick_cube.observation_space["state"].shape == (42,)
    assert isinstance(pick_cube.action_space, spaces.Box)
    observation, _ = pick_cube.reset(seed=1)
    assert pick_cube.observation_space.contains(observation)
    *_, is_terminated, is_truncated, info = pick_cube.step(pick_cube.action_space.sample())
    assert (is_terminated, is_truncated, info["success"]) == (False, False, False)


def test_a_task_ends_at_its_own_time_limit_or_the_config_s(pick_cube: ManiSkill, physics: None) -> None:
    still = np.zeros(8, np.float32)
    with closing(ManiSkill("PickCube-v1", max_episode_steps=3, **STATES)) as short:
        for env, limit in ((pick_cube, 50), (short, 3)):
            env.reset(seed=1)
            ends = [env.step(still)[3] for _ in range(limit)]
            assert ends == [False] * (limit - 1) + [True]


def test_success_ends_an_episode(physics: None) -> None:
    """PushCube's success, by moving the cube to its goal."""
    with closing(ManiSkill("PushCube-v1", **STATES)) as env:
        env.reset(seed=3)
        task: Any = env._task.env
        task.obj.set_pose(task.goal_region.pose)
        *_, is_terminated, is_truncated, info = env.step(np.zeros(8, np.float32))
        assert (is_terminated, is_truncated, info["success"]) == (True, False, True)


def test_other_controllers_have_other_actions(physics: None) -> None:
    env = ManiskillEnv(
        kind="maniskill", task="StackCube-v1", obs_mode="state", control_mode="pd_ee_delta_pos"
    )
    made = env.made_by
    simulator = GymnasiumSimulator(made.id, 1, made.kwargs, rules=env.rules())
    assert simulator.spaces == Spaces(48, ActionSpace("continuous", 4), {})
    simulator.close()


def test_a_batch_is_the_same_simulation(pick_cube: ManiSkill) -> None:
    """The class for GPUs, here with a scene of one environment on the CPU."""
    batch = VectorSimulator(
        f"{ManiSkillBatch.__module__}.ManiSkillBatch",
        1,
        {"task": "PickCube-v1", "sim_backend": "physx_cpu", "max_episode_steps": 4, **STATES},
    )
    assert not batch.resets_together
    for seed in (5, 6):
        observation, _ = pick_cube.reset(seed=seed)
        np.testing.assert_array_equal(batch.reset({0: seed}).observations["state"][0], observation["state"])
        actions = np.sin(np.arange(40, dtype=np.float32)).reshape(5, 8)
        rewards = []
        for action in actions[:4]:
            observation, reward, *_ = pick_cube.step(action)
            rewards.append(np.float32(reward))
        tick = batch.step({0: actions})
        assert not tick.failures
        assert (tick.num_executed[0], tick.is_terminated[0], tick.is_truncated[0]) == (4, False, True)
        np.testing.assert_array_equal(tick.observations["state"][0], observation["state"])
        assert tick.rewards[0].tolist() == [*rewards, 0.0]
        assert tick.success[0, :4].tolist() == [0.0] * 4
    batch.close()


def test_without_vulkan_it_says_what_is_needed() -> None:
    if has_vulkan():
        pytest.skip("this machine has a Vulkan device")
    for options in (STATES, {"obs_mode": "rgb"}):
        with pytest.raises(ConfigError, match=r"env\.kind: ManiSkill cannot create its scene: .*Vulkan"):
            ManiSkill("PickCube-v1", **options)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("PickCub-v1", {}, r"env\.task: ManiSkill has no task 'PickCub-v1', did you mean 'PickCube-v1'"),
        ("PickCube-v1", {"reward_mode": "happy"}, r"env\.kwargs: PickCube-v1 does not accept .*happy"),
        ("PickCube-v1", {"gravty": 1}, r"env\.kwargs: PickCube-v1 does not accept .*gravty"),
        (
            "PutCarrotOnPlateInScene-v1",
            {},
            r"env\.task: .* needs the assets .*, which are not in /.*download_asset",
        ),
    ],
)
def test_wrong_names_and_missing_assets_are_refused(
    task: str, options: dict[str, Any], message: str, physics: None
) -> None:
    with pytest.raises(ConfigError, match=message):
        ManiSkill(task, **STATES | options)
