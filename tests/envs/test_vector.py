"""Gymnasium's VectorEnvs: each auto-reset mode is read as what it means."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from tests.envs.counting import HOT
from tests.envs.on_device import OnDevice

from braid.config.model import MlpSpec
from braid.envs.simulators.base import EpisodeRules, reset_prompts
from braid.envs.simulators.processes import SimulatorProcesses
from braid.envs.simulators.vector import VectorSimulator
from braid.errors import ConfigError
from braid.models.mlp import MlpPolicy
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.engines.simulators import SimulatorEngine

MODES = ("disabled", "same_step", "next_step")


def simulator_of(mode: str, num_envs: int = 2, **options: Any) -> VectorSimulator:
    return VectorSimulator(f"tests.envs.counting.{mode}", num_envs, **options)


@pytest.fixture(params=MODES)
def simulator(request: pytest.FixtureRequest) -> Iterator[VectorSimulator]:
    with closing(simulator_of(request.param)) as made:
        yield made


def chunk(*values: float) -> Any:
    return np.array(values, np.float32)[:, None]


def test_an_end_inside_a_chunk_keeps_its_own_last_observation(simulator: VectorSimulator) -> None:
    tick = simulator.reset({0: 5, 1: 6})
    assert tick.observations["state"].tolist() == [[5, 0], [6, 0]]
    simulator.step({0: chunk(0.5), 1: chunk(0.25)})
    tick = simulator.step({0: chunk(0.5, 0.5, 0.9), 1: chunk(0.25, 0.25, 0.9)})
    assert not tick.failures
    assert tick.observations["state"].tolist() == [[5, 3], [6, 3]]
    assert tick.num_executed.tolist() == [2, 2], "actions after the end are not executed"
    assert tick.rewards.tolist() == [[0.5, 0.5, 0.0], [0.25, 0.25, 0.0]]
    assert (tick.is_terminated.tolist(), tick.is_truncated.tolist()) == ([True, False], [False, True])
    assert tick.success[:, :2].tolist() == [[0, 1], [0, 1]]


def test_the_next_episode_begins_with_its_own_seed(simulator: VectorSimulator) -> None:
    for seeds in ({0: 5, 1: 6}, {0: 8, 1: 9}):
        assert simulator.reset(seeds).observations["state"].tolist() == [[s, 0] for s in seeds.values()]
        tick = simulator.step({slot: chunk(0.1, 0.1) for slot in seeds})
        assert tick.observations["state"].tolist() == [[s, 2] for s in seeds.values()]
        simulator.step({slot: chunk(0.1, 0.1) for slot in seeds})


def test_without_automatic_resets_a_slot_starts_while_others_go_on() -> None:
    with closing(simulator_of("disabled")) as simulator:
        assert not simulator.resets_together
        simulator.reset({0: 5, 1: 6})
        simulator.step({0: chunk(0.1), 1: chunk(0.1)})
        assert simulator.reset({1: 9}).observations["state"][1].tolist() == [9, 0]
        tick = simulator.step({0: chunk(0.1, 0.1), 1: chunk(0.1, 0.1)})
        assert tick.observations["state"].tolist() == [[5, 3], [9, 2]]
        tick = simulator.step({1: chunk(0.1)})
        assert tick.observations["state"][1].tolist() == [9, 3]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_plays_the_same_episodes(mode: str) -> None:
    """Ten episodes in three slots, in lock step or not."""
    with closing(simulator_of(mode, 3)) as simulator:
        engine = SimulatorEngine(simulator, MlpPolicy(MlpSpec(), simulator.spaces, seed=0), retries=0)
        driver = SimulatorDriver(engine, seed=1)
        (prompt,) = reset_prompts("counting", 1)
        group = asyncio.run(driver.group(prompt, 10, (0,)))
        for trajectory in group.trajectories:
            steps = trajectory.env_steps
            assert steps is not None
            assert steps.observations["state"][:, 1].tolist() == [0, 1, 2, 3]
            assert len(set(steps.observations["state"][:, 0])) == 1, (
                "the group's seed, in the last observation too"
            )
            assert trajectory.metrics["success_at_end"] == 1.0


def test_an_exception_fails_all_episodes_and_the_next_reset_makes_a_new_one(
    simulator: VectorSimulator,
) -> None:
    simulator.reset({0: 5, 1: 6})
    tick = simulator.step({0: chunk(0.5), 1: chunk(HOT)})
    assert {why.partition(" (counting.py:")[0] for why in tick.failures.values()} == {
        "RuntimeError: the motor is hot"
    }
    assert list(tick.failures) == [0, 1]
    assert simulator.reset({0: 7, 1: 8}).observations["state"].tolist() == [[7, 0], [8, 0]]
    assert not simulator.step({0: chunk(0.5), 1: chunk(0.5)}).failures


def test_rules_of_episodes_hold() -> None:
    rules = EpisodeRules(max_episode_steps=2, relative_reward=True, reward_scale=2.0)
    with closing(simulator_of("disabled", rules=rules)) as simulator:
        simulator.reset({0: 5, 1: 6})
        tick = simulator.step({0: chunk(0.5, 0.25, 0.0), 1: chunk(0.0, 0.5, 0.0)})
        assert tick.rewards.tolist() == [[1.0, -0.5, 0.0], [0.0, 1.0, 0.0]]
        assert tick.is_truncated.tolist() == [True, True]
        assert tick.num_executed.tolist() == [2, 2]
    with pytest.raises(ConfigError, match=r"env\.ignore_terminations: .*env\.vectorized"):
        simulator_of("disabled", rules=EpisodeRules(2, ignore_terminations=True))


def test_in_processes_too() -> None:
    with closing(
        SimulatorProcesses(
            "tests.envs.counting.same_step", 4, is_vectorized=True, num_processes=2, timeout_s=60
        )
    ) as simulator:
        assert simulator.resets_together
        states = simulator.reset({slot: slot for slot in range(4)}).observations["state"]
        assert states.tolist() == [[slot, 0] for slot in range(4)]
        tick = simulator.step({slot: chunk(0.5, 0.5, 0.5, 0.5) for slot in range(4)})
        assert tick.observations["state"].tolist() == [[slot, 3] for slot in range(4)]


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("tests.envs.counting.Counting", r"env\.kwargs: .*num_envs"),
        ("CartPole-v7", r"env\.id: .*'CartPole-v7'"),
    ],
)
def test_what_makes_no_vector_is_refused(env_id: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VectorSimulator(env_id, 2)


class Watched(MlpPolicy):
    """Records the types of the observations by which it acts."""

    def act(self, observations: dict[str, Any], uniforms: Any, temperature: Any = None) -> Any:
        self.types = {name: type(tensor) for name, tensor in observations.items()}
        return super().act(
            {
                name: torch.as_tensor(tensor).as_subclass(torch.Tensor)
                for name, tensor in observations.items()
            },
            uniforms,
            temperature,
        )


def drifted(*, is_guarded: bool, num_processes: int = 0) -> tuple[Any, Any]:
    """Four episodes in three slots, and the types of the observations that the policy got."""
    env_id, options = "tests.envs.on_device.Drifting", {"is_guarded": is_guarded}
    simulator: Any = VectorSimulator(env_id, 3, options)
    if num_processes:
        simulator = SimulatorProcesses(env_id, 3, options, is_vectorized=True, timeout_s=60.0)
    with closing(simulator):
        policy = Watched(MlpSpec(channels=(4,), num_action_chunks=2), simulator.spaces, seed=0)
        driver = SimulatorDriver(SimulatorEngine(simulator, policy, retries=0), seed=1)
        (prompt,) = reset_prompts("drifting", 1)
        group = asyncio.run(driver.group(prompt, 4, (0,)))
    return [(t.reward, t.env_steps) for t in group.trajectories], policy.types


def test_tensors_stay_on_their_device_until_an_episode_has_ended() -> None:
    before = OnDevice.moved
    guarded, types = drifted(is_guarded=True)
    assert types == {"image": OnDevice, "state": OnDevice}
    assert OnDevice.moved - before == 2 * 4, "the image and the state of each episode, once"
    in_processes, of_processes = drifted(is_guarded=True, num_processes=1)
    assert of_processes == {"image": np.ndarray, "state": np.ndarray}
    for other in (drifted(is_guarded=False)[0], in_processes):
        for (reward, steps), (expected, expected_steps) in zip(other, guarded, strict=True):
            assert reward == expected
            for name, values in expected_steps.observations.items():
                assert type(values) is np.ndarray
                np.testing.assert_array_equal(steps.observations[name], values)
            assert expected_steps.observations["image"].dtype == np.uint8
            np.testing.assert_array_equal(steps.logprobs, expected_steps.logprobs)


def test_a_tensor_that_is_not_finite_is_a_failure_of_its_slot_alone() -> None:
    with closing(VectorSimulator("tests.envs.on_device.Drifting", 2, {"is_guarded": True})) as simulator:
        simulator.reset({0: 1, 1: 2})
        tick = simulator.step({0: chunk(0.5), 1: chunk(float("nan"))})
    assert list(tick.failures) == [1]
    assert "is not finite" in tick.failures[1]
