from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from braid.envs.simulators.base import reset_prompts
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.errors import ConfigError
from braid.types import ActionSpace, Spaces


class Faulty(gymnasium.Env):
    """Fails in the way that the action names; its observation counts its steps."""

    observation_space = gymnasium.spaces.Discrete(10)
    action_space = gymnasium.spaces.Discrete(4, start=5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return 0, {}

    def step(self, action: int) -> Any:
        self.count += 1
        if action == 6:
            raise RuntimeError("the motor is hot")
        return self.count, float("nan") if action == 7 else 1.0, action == 8, False, {}


gymnasium.register("Faulty-v0", lambda **kwargs: Faulty())


def test_it_steps_as_the_bare_environment_does() -> None:
    simulator = GymnasiumSimulator("CartPole-v1", 2)
    bare = gymnasium.make("CartPole-v1")
    expected, _ = bare.reset(seed=11)
    tick = simulator.reset({1: 11})
    np.testing.assert_array_equal(tick.observations["state"][1], expected)
    is_terminated = False
    while not is_terminated:
        expected, reward, is_terminated, is_truncated, _ = bare.step(1)
        tick = simulator.step({1: np.array([1])})
        np.testing.assert_array_equal(tick.observations["state"][1], expected)
        assert tick.rewards[1] == reward
        assert (tick.is_terminated[1], tick.is_truncated[1]) == (is_terminated, is_truncated)
    simulator.close()


def test_time_limits_are_kept_apart_from_ends() -> None:
    simulator = GymnasiumSimulator("Pendulum-v1", 1, {"max_episode_steps": 3})
    simulator.reset({0: 0})
    ticks = [simulator.step({0: np.zeros((1, 1), np.float32)}) for _ in range(3)]
    assert [bool(t.is_truncated[0]) for t in ticks] == [False, False, True]
    assert not any(t.is_terminated[0] for t in ticks)


def test_spaces_become_sizes() -> None:
    cart_pole, pendulum = GymnasiumSimulator("CartPole-v1", 1), GymnasiumSimulator("Pendulum-v1", 1)
    assert cart_pole.spaces == Spaces(4, ActionSpace("discrete", 2))
    assert pendulum.spaces == Spaces(3, ActionSpace("continuous", 1))
    faulty = GymnasiumSimulator("Faulty-v0", 1)
    assert faulty.spaces.state_size == 10, "a choice is flattened to one-hot"


def test_vectors_are_clipped_to_their_bounds() -> None:
    simulator = GymnasiumSimulator("Pendulum-v1", 2)
    simulator.reset({0: 3, 1: 3})
    tick = simulator.step({0: np.array([[2.0]], np.float32), 1: np.array([[50.0]], np.float32)})
    np.testing.assert_array_equal(tick.observations["state"][0], tick.observations["state"][1])


def test_choices_start_where_the_space_starts() -> None:
    simulator = GymnasiumSimulator("Faulty-v0", 1)
    simulator.reset({0: 0})
    assert simulator.step({0: np.array([3])}).is_terminated[0], "choice 3 is action 8"


def test_a_failure_stays_in_its_slot_and_the_slot_can_be_reset() -> None:
    simulator = GymnasiumSimulator("Faulty-v0", 3)
    simulator.reset({0: 0, 1: 0, 2: 0})
    tick = simulator.step({0: np.array([0]), 1: np.array([1]), 2: np.array([2])})
    assert tick.rewards[0] == 1.0
    assert tick.failures[1] == "RuntimeError: the motor is hot"
    assert "reward [nan]" in tick.failures[2]
    simulator.reset({1: 0})
    assert simulator.step({1: np.array([0])}).observations["state"][1].argmax() == 1


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("CartPole-v7", {}, r"env\.id: .*'CartPole-v7', did you mean 'CartPole-v1'\?"),
        ("CartPole-v1", {"gravty": 1}, r"env\.kwargs: CartPole-v1 does not accept {'gravty': 1}"),
        ("BipedalNothing", {}, r"env\.id: Gymnasium cannot make 'BipedalNothing'"),
    ],
)
def test_an_environment_that_cannot_be_created_is_a_config_problem(
    env_id: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GymnasiumSimulator(env_id, 1, kwargs)


class _Arms(Faulty):
    action_space = gymnasium.spaces.MultiBinary(3)  # pyright: ignore[reportAssignmentType]


gymnasium.register("Arms-v0", lambda **kwargs: _Arms())


def test_actions_of_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"MultiBinary\(3\); supported are Discrete, and Box of floats"):
        GymnasiumSimulator("Arms-v0", 1)


def test_prompts_of_a_simulator_are_numbered() -> None:
    assert [p.uid for p in reset_prompts("CartPole-v1", 2)] == ["CartPole-v1:0", "CartPole-v1:1"]
