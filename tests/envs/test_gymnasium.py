from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from braid.envs.simulators.base import reset_prompts
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.envs.simulators.processes import SimulatorProcesses
from braid.envs.simulators.vector import make_simulator
from braid.errors import ConfigError, EnvError
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
    assert tick.failures[1].startswith("RuntimeError: the motor is hot (test_gymnasium.py:")
    assert tick.failures[2] == "the reward [nan] is not finite"
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


class Wrong(gymnasium.Env):
    """Its first observation, its last one, or the result of a method is not what its space or Gymnasium
    says."""

    observation_space = gymnasium.spaces.Dict(
        {
            "camera": gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "joints": gymnasium.spaces.Box(-1, 1, (3,), np.float32),
            "instruction": gymnasium.spaces.Text(9),
        }
    )
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reset: Any = None, step: Any = None, observation: Any = None) -> None:
        self._reset, self._step, self._observation = reset, step, {} if observation is None else observation

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._observed(self._observation) if self._reset is None else self._reset

    def step(self, action: int) -> Any:
        return (self._observed({})[0], 0.0, False, False, {}) if self._step is None else self._step

    def _observed(self, other: Any) -> Any:
        right = {"camera": np.zeros((4, 4, 3), np.uint8), "joints": np.zeros(3), "instruction": "push"}
        return ({**right, **other} if isinstance(other, dict) else other), {}


_SEEN = "{camera: uint8 (4, 4, 3), joints: float64 (3,), instruction: str}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"observation": {"joints": np.zeros(1)}}, _SEEN.replace("(3,)", "(1,)")),
        ({"observation": {"joints": 0.5}}, _SEEN.replace("float64 (3,)", "float")),
        ({"observation": {"joints": np.zeros((1, 3))}}, _SEEN.replace("(3,)", "(1, 3)")),
        ({"observation": {"joints": "abc"}}, _SEEN.replace("float64 (3,)", "str")),
        ({"observation": {"camera": np.zeros((4, 5, 3), np.uint8)}}, _SEEN.replace("(4, 4, 3)", "(4, 5, 3)")),
        ({"observation": {"camera": np.zeros((4, 4, 3))}}, _SEEN.replace("uint8", "float64")),
        ({"observation": {"camera": None}}, _SEEN.replace("uint8 (4, 4, 3)", "NoneType")),
        ({"observation": {"instruction": None}}, _SEEN.replace(": str", ": NoneType")),
        ({"observation": np.zeros(3)}, "the observation float64 (3,) does not fit its space {camera: uint8 (4, 4, 3),"),
        ({"observation": {"joints": np.full(3, np.inf)}}, "the observation [inf inf inf] is not finite"),
        ({"reset": np.zeros(3)}, "reset returned float64 (3,), not (observation, info)"),
        ({"step": (np.zeros(3), 0.0, False, {})}, "step returned (float64 (3,), float, bool, {}), not (obs"),
        ({"step": (0, np.zeros(2), False, False, {})}, "step returned (int, float64 (2,), bool, bool, {}), not"),
        ({"step": (0, 1.0, False, False, None)}, "step returned (int, float, bool, bool, NoneType), not"),
        ({"step": (0, 1.0, False, False, {"success": "yes"})}, "could not convert string to float: 'yes'"),
        ({"step": (0, 1.0, False, False, {})}, "the observation int does not fit its space {camera: uint8 (4, 4, 3),"),
    ],
)  # fmt: skip
def test_what_an_environment_returns_has_to_fit_its_spaces(wrong: dict[str, Any], message: str) -> None:
    simulator = GymnasiumSimulator("tests.envs.test_gymnasium.Wrong", 1, wrong)
    tick = simulator.reset({0: 0})
    if not tick.failures:
        tick = simulator.step({0: np.array([0])})
    assert message in tick.failures[0]


@pytest.mark.parametrize("joints", [np.zeros((3, 2)), np.zeros(6), np.zeros((2, 1))])
def test_an_array_of_the_right_size_and_another_shape_is_wrong_too(joints: Any) -> None:
    simulator = GymnasiumSimulator("tests.envs.test_gymnasium.Flat", 1, {"joints": joints})
    assert "does not fit its space" in simulator.reset({0: 0}).failures[0]


class Flat(Faulty):
    observation_space = gymnasium.spaces.Box(-1, 1, (2, 3), np.float32)  # pyright: ignore[reportAssignmentType]

    def __init__(self, joints: Any) -> None:
        self._joints = joints

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._joints, {}


class Broken(Faulty):
    def __init__(self) -> None:
        raise OSError("no arm at /dev/ttyUSB0")


def test_an_environment_that_raises_when_it_is_made_is_named() -> None:
    why = r"test_gymnasium\.Broken cannot be created: OSError: no arm at /dev/ttyUSB0 \(test_gymnasium\.py:\d+\)"
    with pytest.raises(EnvError, match=why):
        make_simulator("tests.envs.test_gymnasium.Broken", 1)
    with pytest.raises(EnvError, match=why):
        SimulatorProcesses("tests.envs.test_gymnasium.Broken", 1, timeout_s=60)


class _Arms(Faulty):
    action_space = gymnasium.spaces.MultiBinary(3)  # pyright: ignore[reportAssignmentType]


gymnasium.register("Arms-v0", lambda **kwargs: _Arms())


def test_actions_of_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"MultiBinary\(3\); supported are Discrete, and Box of floats"):
        GymnasiumSimulator("Arms-v0", 1)


def test_prompts_of_a_simulator_are_numbered() -> None:
    assert [p.uid for p in reset_prompts("CartPole-v1", 2)] == ["CartPole-v1:0", "CartPole-v1:1"]
