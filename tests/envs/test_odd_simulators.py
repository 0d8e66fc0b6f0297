"""Whatever an environment of a simulator returns or raises costs its own episode, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.envs.simulators.vector import VectorSimulator

from .odd import NUMBERS, RAISED, RECORDS, TRUTHS, Unreadable, nested

SEEN = np.zeros(1, np.float32)
OBSERVATIONS: dict[str, Any] = {
    "none": None,
    "text": "seen",
    "number": 1.0,
    "shorter": np.zeros(0, np.float32),
    "longer": np.zeros(2, np.float32),
    "texts": np.array(["a"]),
    "nan": np.array([np.nan], np.float32),
    "dict": {"state": SEEN},
    "unreadable": Unreadable(),
    "nested": nested(2000),
}
INFOS: dict[str, Any] = {"none": None, "list": [], "text": "x", "success text": {"success": "yes"},
                         "unreadable": Unreadable(), "success unreadable": {"success": Unreadable()}}  # fmt: skip
STEPS: dict[str, Any] = {
    **{f"reward {name}": (SEEN, value, False, False, {}) for name, value in NUMBERS.items()},
    **{f"is_terminated {name}": (SEEN, 1.0, value, False, {}) for name, value in TRUTHS.items()},
    **{f"is_truncated {name}": (SEEN, 1.0, False, value, {}) for name, value in TRUTHS.items()},
    **{f"observation {name}": (value, 1.0, False, False, {}) for name, value in OBSERVATIONS.items()},
    **{f"info {name}": (SEEN, 1.0, False, False, value) for name, value in INFOS.items()},
    **{f"step {name}": value for name, value in RECORDS.items()},
    "step of four": (SEEN, 1.0, False, {}),
}
RESETS: dict[str, Any] = {
    **{f"observation {name}": (value, {}) for name, value in OBSERVATIONS.items()},
    **{f"reset {name}": value for name, value in RECORDS.items()},
    "reset without info": SEEN,
}
CASES = [
    *(("step", what) for what in (*STEPS, *RAISED)),
    *(("reset", what) for what in (*RESETS, *RAISED)),
]


class OddSimulator(gymnasium.Env):
    """The first copy does what `what` names in its `at`, the others do not."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self, at: str, what: str) -> None:
        self._at, self._what, self._is_odd = at, what, OddSimulator.made == 0
        OddSimulator.made += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._odd("reset", RESETS, (SEEN, {}))

    def step(self, action: Any) -> Any:
        return self._odd("step", STEPS, (SEEN, 1.0, False, False, {"success": True}))

    def _odd(self, at: str, table: dict[str, Any], else_: Any) -> Any:
        if not self._is_odd or self._at != at:
            return else_
        if self._what in RAISED:
            raise RAISED[self._what]("from the user")
        return table[self._what]


Make = Callable[[str, str], GymnasiumSimulator]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[GymnasiumSimulator] = []

    def build(at: str, what: str) -> GymnasiumSimulator:
        OddSimulator.made = 0
        made.append(GymnasiumSimulator(f"{__name__}.OddSimulator", 2, {"at": at, "what": what}))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.mark.parametrize(("at", "what"), CASES)
def test_an_odd_value_or_exception_fails_one_episode_with_a_reason(make: Make, at: str, what: str) -> None:
    simulator = make(at, what)
    tick = simulator.reset({0: 1, 1: 2})
    if at == "step":
        assert not tick.failures
        tick = simulator.step({0: np.zeros((1,), np.int64), 1: np.zeros((1,), np.int64)})
    assert set(tick.failures) == {0}
    assert 5 < len(tick.failures[0]) < 600
    tick = simulator.reset({0: 1})
    assert not tick.failures, "the environment is a new one"
    again = simulator.step({0: np.zeros((1,), np.int64), 1: np.zeros((1,), np.int64)})
    assert not again.failures
    assert again.rewards.tolist() == [[1.0], [1.0]]


class OddVector(gymnasium.vector.VectorEnv):
    """Two copies whose steps return what `what` names."""

    def __init__(self, what: str = "", num_envs: int = 2) -> None:
        self.num_envs, self._what = num_envs, what
        self.single_observation_space, self.single_action_space = (
            OddSimulator.observation_space,
            OddSimulator.action_space,
        )
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        if self._what in RAISED:
            raise RAISED[self._what]("from the user")
        odd, outcome = VECTORS[self._what], [np.ones(2), np.zeros(2, bool), np.zeros(2, bool)]
        place = ["rewards", "is_terminated", "is_truncated"].index(self._what.split()[0])
        outcome[place] = odd
        return np.zeros((2, 1), np.float32), *outcome, {}


VECTORS: dict[str, Any] = {
    "rewards text": np.array(["1", "2"]),
    "rewards objects": np.array([1, None], object),
    "rewards of one": np.ones(1),
    "rewards number": 1.0,
    "rewards none": None,
    "is_terminated text": np.array(["False", ""]),
    "is_terminated number": np.array([0.0, 0.5]),
    "is_truncated none": None,
    "is_truncated of one": np.zeros(1, bool),
}


@pytest.mark.parametrize("what", [*VECTORS, *RAISED])
def test_an_odd_value_of_environments_that_step_together_fails_their_episodes(what: str) -> None:
    simulator = VectorSimulator(f"{__name__}.OddVector", 2, {"what": what})
    assert not simulator.reset({0: 1, 1: 2}).failures
    tick = simulator.step({slot: np.zeros((1,), np.int64) for slot in range(2)})
    assert set(tick.failures) == {0, 1}
    assert not simulator.reset({0: 1, 1: 2}).failures
    simulator.close()
