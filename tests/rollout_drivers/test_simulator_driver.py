from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.driven import drive
from tests.rows import rows_of

from braid.config.model import MlpSpec
from braid.envs.simulators.base import Tick, reset_prompts
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.envs.simulators.processes import SimulatorProcesses
from braid.errors import EngineError
from braid.models.mlp import MlpPolicy
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.engines.simulators import SimulatorEngine
from braid.training.packing import pack
from braid.types import ActionSpace, EnvSteps, Group, Spaces, Status, Trajectory


def _policy(simulator: Any) -> MlpPolicy:
    """Random enough that episodes differ."""
    policy = MlpPolicy(MlpSpec(), simulator.spaces, seed=0)
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(policy.module.get_parameter("head.weight"), std=0.3, generator=generator)
    return policy


def _collect(
    env_id: str = "CartPole-v1",
    *,
    num_envs: int = 4,
    num_prompts: int = 5,
    group_size: int = 2,
    key: tuple[int, ...] = (0, 1),
    seed: int = 3,
    kwargs: Mapping[str, Any] | None = None,
    temperature: float | None = 1.0,
) -> list[Group]:
    simulator = GymnasiumSimulator(env_id, num_envs, kwargs)
    engine = SimulatorEngine(simulator, _policy(simulator), retries=1)
    asyncio.run(engine.set_weights(6))
    driver = SimulatorDriver(engine, seed=seed, temperature=temperature)
    with closing(engine):
        return drive(driver, reset_prompts(env_id, num_prompts), group_size, key)


def _steps(groups: Sequence[Group]) -> list[EnvSteps]:
    return [t.env_steps for g in groups for t in g.trajectories if t.env_steps is not None]


def _assert_equal(one: Sequence[Group], other: Sequence[Group]) -> None:
    for left, right in zip(_steps(one), _steps(other), strict=True):
        for name in ("state", "actions"):
            one_of, other_of = (steps.observations | steps.inputs for steps in (left, right))
            np.testing.assert_array_equal(one_of[name], other_of[name])
        for name in ("logprobs", "rewards", "num_executed"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


def test_episodes_are_complete_and_their_reward_is_the_return() -> None:
    groups = _collect()
    assert [g.prompt.uid for g in groups] == [f"CartPole-v1:{i}" for i in range(5)]
    for trajectory in (t for g in groups for t in g.trajectories):
        steps = trajectory.env_steps
        assert steps is not None
        assert trajectory.status is Status.FINISHED
        assert trajectory.reward == len(steps.rewards) == len(steps.inputs["actions"]) == len(steps.logprobs)
        assert len(steps.observations["state"]) == len(steps.rewards) + 1
        assert steps.policy_version == 6


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("num_envs", [1, 3, 16])
def test_results_do_not_depend_on_the_number_of_environments(env_id: str, num_envs: int) -> None:
    kwargs = {"max_episode_steps": 40}
    _assert_equal(_collect(env_id, kwargs=kwargs), _collect(env_id, kwargs=kwargs, num_envs=num_envs))


@pytest.mark.parametrize("num_processes", [1, 2])
def test_stages_change_no_result(num_processes: int) -> None:
    def played(num_stages: int) -> list[Group]:
        kwargs = {"max_episode_steps": 12}
        simulator = SimulatorProcesses("Pendulum-v1", 5, kwargs, num_processes=num_processes, timeout_s=60)
        engine = SimulatorEngine(simulator, _policy(simulator), retries=1, num_stages=num_stages)
        with closing(engine):
            return drive(SimulatorDriver(engine, seed=3), reset_prompts("Pendulum-v1", 4), 2)

    one = played(1)
    assert len(_steps(one)) == 8
    for num_stages in (2, 5):
        _assert_equal(one, played(num_stages))


def test_episodes_that_are_cancelled_while_they_are_stepped_leave_their_slots_to_others() -> None:
    simulator = SimulatorProcesses("Pendulum-v1", 4, {"max_episode_steps": 12}, timeout_s=60)
    engine = SimulatorEngine(simulator, _policy(simulator), retries=0, num_stages=2)
    driver = SimulatorDriver(engine, seed=3)
    prompts = reset_prompts("Pendulum-v1", 3)

    async def scenario() -> list[Group]:
        first = [asyncio.create_task(driver.group(p, 2, (0, i))) for i, p in enumerate(prompts)]
        for _ in range(12):
            await asyncio.sleep(0)
        for task in first[1:]:
            task.cancel()
        again = [asyncio.create_task(driver.group(p, 2, (0, i))) for i, p in enumerate(prompts)]
        return [await first[0], *[await task for task in again]]

    with closing(engine):
        cancelled, *whole = asyncio.run(scenario())
    alone = GymnasiumSimulator("Pendulum-v1", 6, {"max_episode_steps": 12})
    engine = SimulatorEngine(alone, _policy(alone), retries=0)
    with closing(engine):
        expected = drive(SimulatorDriver(engine, seed=3), prompts, 2, (0,))
    _assert_equal([cancelled, *whole], [expected[0], *expected])


def test_a_group_shares_its_first_state_and_differs_in_actions() -> None:
    groups = _collect()
    starts = {steps.observations["state"][0].tobytes() for steps in _steps(groups)}
    assert len(starts) == 5
    for group in groups:
        one, other = _steps([group])
        np.testing.assert_array_equal(one.observations["state"][0], other.observations["state"][0])
        assert one.inputs["actions"].tolist() != other.inputs["actions"].tolist()


def test_rounds_and_seeds_have_different_starts_and_repeats_are_equal() -> None:
    first = _collect()
    _assert_equal(first, _collect())
    for other in (_collect(key=(0, 2)), _collect(seed=4)):
        assert (
            _steps(first)[0].observations["state"][0].tolist()
            != _steps(other)[0].observations["state"][0].tolist()
        )


def test_greedy_episodes_take_the_likeliest_actions() -> None:
    one, other = _steps(_collect(num_prompts=1, temperature=None))
    assert one.inputs["actions"].tolist() == other.inputs["actions"].tolist()


class Faulty(gymnasium.Env):
    """Four steps an episode. The first reset of all raises, and the first episode's last reward is not a
    number."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    faults: ClassVar[set[str]] = set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict]:
        if "reset" in self.faults:
            self.faults.remove("reset")
            raise RuntimeError("the arm is not at home")
        self._count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict]:
        self._count += 1
        is_over, reward = self._count == 4, 1.0
        if is_over and "reward" in self.faults:
            self.faults.remove("reward")
            reward = float("nan")
        return np.full(1, self._count, np.float32), reward, is_over, False, {}


@pytest.mark.parametrize("fault", ["reset", "reward"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_episode_that_fails_in_reset_or_the_last_step_is_replayed_completely(
    monkeypatch: pytest.MonkeyPatch, fault: str, num_envs: int
) -> None:
    monkeypatch.setitem(
        gymnasium.registry, "Faulty-v0", gymnasium.envs.registration.EnvSpec("Faulty-v0", Faulty)
    )
    monkeypatch.setattr(Faulty, "faults", {fault})
    groups = _collect("Faulty-v0", num_envs=num_envs, num_prompts=2)
    assert sorted(t.attempts for g in groups for t in g.trajectories) == [1, 1, 1, 2]
    for trajectory in (t for g in groups for t in g.trajectories):
        assert trajectory.status is Status.FINISHED
        assert trajectory.env_steps is not None
        assert trajectory.env_steps.observations["state"][:, 0].tolist() == [0, 1, 2, 3, 4]
        assert trajectory.env_steps.rewards[:, 0].tolist() == [1, 1, 1, 1]


def test_a_time_limit_truncates() -> None:
    groups = _collect("Pendulum-v1", kwargs={"max_episode_steps": 5})
    assert {t.status for g in groups for t in g.trajectories} == {Status.TRUNCATED}
    assert not any(row.is_terminal for row in rows_of(groups))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_recorded_logprobs_are_those_that_training_computes(env_id: str) -> None:
    groups = _collect(env_id, kwargs={"max_episode_steps": 30})
    simulator = GymnasiumSimulator(env_id, 1)
    policy = _policy(simulator)
    for row in rows_of(groups):
        batch = pack([row], torch.device("cpu"))
        logprobs = policy.forward(batch, frozenset({"logprobs"}))["logprobs"].detach().numpy()
        np.testing.assert_allclose(logprobs, row.fields["behavior_logprobs"], atol=1e-5)  # fp32 rounding


class Fragile:
    """Two slots; episodes fail at their second step as often as the last decimal digit of their seed says."""

    num_envs = 2
    resets_together = False
    spaces = Spaces(1, ActionSpace("discrete", 2))

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.count = [0, 0]
        self.seed = [0, 0]
        self.bad_seed: int | None = None

    def _tick(self, slots: Mapping[int, object], failures: Mapping[int, str]) -> Tick:
        tick = Tick.empty(2, self.spaces, 1)
        tick.observations["state"][:, 0] = self.count
        tick.rewards[:], tick.num_executed[:] = 1, 1
        tick.is_terminated[:] = [count >= 4 for count in self.count]
        tick.failures.update(failures)
        return tick

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Tick:
        for slot, seed in seeds.items():
            self.count[slot], self.seed[slot] = 0, seed
            self.bad_seed = seed if self.bad_seed is None else self.bad_seed
        return self._tick(seeds, {})

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        failures = {}
        for slot in actions:
            self.count[slot] += 1
            if self.seed[slot] == self.bad_seed and self.count[slot] == 2 and self.num_failures:
                self.num_failures -= 1
                failures[slot] = "the arm fell off"
        return self._tick(actions, failures)

    def close(self) -> None:
        pass


def _fragile(num_failures: int) -> list[Trajectory]:
    simulator = Fragile(num_failures)
    engine = SimulatorEngine(simulator, _policy(simulator), retries=1)
    groups = drive(SimulatorDriver(engine, seed=0), reset_prompts("fragile", 4))
    return [t for g in groups for t in g.trajectories]


def test_a_failed_episode_is_replayed() -> None:
    trajectories = _fragile(1)
    assert [t.status for t in trajectories] == [Status.FINISHED] * 4
    assert [t.attempts for t in trajectories] == [2, 1, 1, 1]
    assert [t.reward for t in trajectories] == [4.0] * 4


def test_an_episode_that_keeps_failing_is_invalid_and_others_continue() -> None:
    trajectories = _fragile(2)
    assert [t.status for t in trajectories] == [Status.INVALID, *[Status.FINISHED] * 3]
    assert trajectories[0].reason == "environment: the arm fell off"
    assert trajectories[0].reward is None


def test_a_policy_with_non_finite_outputs_is_an_error() -> None:
    simulator = GymnasiumSimulator("CartPole-v1", 1)
    policy = _policy(simulator)
    torch.nn.init.constant_(policy.module.get_parameter("head.bias"), float("nan"))
    engine = SimulatorEngine(simulator, policy, retries=1)
    with pytest.raises(EngineError, match="not finite"):
        drive(SimulatorDriver(engine, seed=0), reset_prompts("CartPole-v1", 1))


def test_new_weights_take_over_running_episodes_or_wait_for_them() -> None:
    simulator = GymnasiumSimulator("Pendulum-v1", 2, {"max_episode_steps": 12})
    policy = _policy(simulator)
    engine = SimulatorEngine(simulator, policy, retries=0, owns_weights=True)
    driver = SimulatorDriver(engine, seed=0)
    (prompt,) = reset_prompts("Pendulum-v1", 1)

    async def scenario() -> None:
        running = asyncio.create_task(driver.group(prompt, 2, (0, 0)))
        for _ in range(6):
            await asyncio.sleep(0)
        torch.nn.init.constant_(policy.module.get_parameter("head.weight"), 0.0)
        torch.nn.init.constant_(policy.module.get_parameter("head.bias"), 100.0)  # every action is near 100
        await engine.set_weights(1, "interrupt")
        switch = asyncio.create_task(engine.set_weights(2))
        await asyncio.sleep(0)
        held = asyncio.create_task(driver.group(prompt, 2, (0, 1)))
        for row in rows_of([await running]):
            versions = row.policy_versions[:12]
            assert versions.tolist() == sorted(versions)
            assert set(versions) == {0, 1}
            assert ((row.inputs["actions"][:12, 0] > 50) == (versions == 1)).all()
        await switch
        assert {steps.policy_version for steps in _steps([await held])} == {2}

    with closing(engine):
        asyncio.run(scenario())


def test_the_first_evaluation_episodes_are_filmed_action_by_action() -> None:
    env_id, kwargs = "examples.tabletop.Tabletop", {"max_episode_steps": 5}
    for simulator in (
        GymnasiumSimulator(env_id, 2, kwargs),
        SimulatorProcesses(env_id, 2, kwargs, num_processes=2, timeout_s=60),
    ):
        policy = MlpPolicy(MlpSpec(num_action_chunks=3, channels=(4,)), simulator.spaces, seed=0)
        engine = SimulatorEngine(simulator, policy, retries=0)
        asyncio.run(engine.set_weights(0))
        with closing(engine):
            groups = drive(SimulatorDriver(engine, seed=0, num_filmed=2), reset_prompts("t", 3), 2, (0, 1))
        films = [t.recording for group in groups for t in group.trajectories]
        assert [film is not None for film in films] == [True, False, True, False, False, False]
        for film, group in zip(films[::2], groups[:2], strict=False):
            steps = group.trajectories[0].env_steps
            assert film is not None
            assert steps is not None
            assert len(film.frames) == 6, "one after the reset, and one after each of 5 actions, in 2 chunks"
            np.testing.assert_array_equal(film.frames[0], steps.observations["image"][0])
            np.testing.assert_array_equal(film.frames[-1], steps.observations["image"][-1])
            assert film.title.startswith("put the ")
            assert sum(film.rewards) == pytest.approx(group.trajectories[0].reward)


def test_a_film_needs_a_picture() -> None:
    simulator = GymnasiumSimulator("CartPole-v1", 1)
    tick = simulator.reset({0: 0}, filmed=[0])
    assert "set env.kwargs.render_mode=rgb_array, or save to false" in tick.failures[0]
    assert not simulator.reset({0: 0}).failures, "the next episode is not filmed"
