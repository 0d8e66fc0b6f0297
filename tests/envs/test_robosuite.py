"""robosuite with real physics, from states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from tests.needs import needs

from braid.envs.simulators.adapters.robosuite import Robosuite
from braid.errors import ConfigError

pytestmark = [needs("robosuite"), pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def lift() -> Iterator[Robosuite]:
    with closing(Robosuite("Lift", max_episode_steps=15)) as env:
        yield env


def played(env: Any, seed: int) -> list[Any]:
    history = [env.reset(seed=seed)[0]["state"].tobytes()]
    for number in range(15):
        observation, reward, *_ = env.step(np.full(env.action_space.shape, np.sin(number), np.float32))
        history += [observation["state"].tobytes(), reward]
    return history


def test_the_seed_of_a_reset_decides_an_episode_and_leaves_numpy_s_generator_alone(lift: Robosuite) -> None:
    np.random.seed(3)  # noqa: NPY002
    expected = np.random.random(2)  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    np.random.random(1)  # noqa: NPY002
    first = played(lift, 5)
    assert np.random.random(1) == expected[1:]  # noqa: NPY002
    assert played(lift, 6) != first
    assert played(lift, 5) == first
    with closing(Robosuite("Lift", max_episode_steps=15)) as fresh:
        assert played(fresh, 5) == first


def test_it_is_a_gymnasium_environment(lift: Robosuite) -> None:
    observation, _ = lift.reset(seed=1)
    assert lift.observation_space.contains(observation)
    ends = [lift.step(lift.action_space.sample())[2:4] for _ in range(15)]
    assert ends == [(False, False)] * 14 + [(False, True)]


def test_success_is_robosuite_s_own(lift: Robosuite) -> None:
    """The cube above the table is lifted."""
    lift.reset(seed=1)
    env: Any = lift._env
    state = env.sim.data.get_joint_qpos(env.cube.joints[0])
    state[2] += 0.2
    env.sim.data.set_joint_qpos(env.cube.joints[0], state)
    *_, info = lift.step(np.zeros(lift.action_space.shape, np.float32))
    assert info["success"]


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("Lifd", {}, r"env\.task: robosuite has no task 'Lifd', did you mean 'Lift'"),
        (
            "Lift",
            {"robots": ["Pandaa"]},
            r"env\.robots: robosuite has no robot 'Pandaa', did you mean 'Panda'",
        ),
        ("Lift", {"kwargs": {"gravty": 1}}, r"env\.kwargs: Lift does not accept .*gravty"),
    ],
)
def test_wrong_names_are_refused(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Robosuite(task, **options)
