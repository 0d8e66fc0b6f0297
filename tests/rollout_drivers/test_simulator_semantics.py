"""Episodes by the rules of robots' simulators: what ends them, what they are paid, where they begin, and how
many there are in a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.driven import drive
from tests.formulas import advantage_of
from tests.rows import rows_of

from braid.algorithms.recipes import Recipe
from braid.config.load import load_config
from braid.config.model import MlpSpec
from braid.envs.kinds import GymnasiumEnv, SimulatorEnv
from braid.envs.simulators.base import AS_IT_IS, EpisodeRules, reset_prompts
from braid.envs.simulators.gymnasium import GymnasiumSimulator
from braid.errors import ConfigError
from braid.models.mlp import MlpPolicy
from braid.rollout.drivers.simulators import SimulatorDriver
from braid.rollout.engines.simulators import SimulatorEngine
from braid.training.advantages import compute_advantages
from braid.types import EnvSteps, Group, Status, Trajectory

LENGTH = 5


class Counter(gymnasium.Env):
    """Terminates after LENGTH steps, or fails in them if `fails`; goes on when it is stepped further. The
    observation is (seed, number of the step), the reward of step t is t^2. Only step LENGTH is a success."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict]:
        self._seed, self._count = seed, 0
        return self._observed(), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict]:
        self._count += 1
        if self._fails and self._count == LENGTH:
            raise RuntimeError("the arm fell off")
        is_done = self._count == LENGTH
        return self._observed(), float(self._count**2), is_done, False, {"success": is_done}

    def _observed(self) -> NDArray[np.float32]:
        return np.array([self._seed, self._count], np.float32)


COUNTER = f"{__name__}.Counter"


def collect(
    *,
    rules: EpisodeRules = AS_IT_IS,
    chunk: int = 1,
    num_envs: int = 3,
    group_size: int = 2,
    seeds: Sequence[int] | None = None,
    fails: bool = False,
    **settings: Any,
) -> list[Group]:
    simulator = GymnasiumSimulator(COUNTER, num_envs, {"fails": fails}, rules=rules)
    policy = MlpPolicy(MlpSpec(num_action_chunks=chunk), simulator.spaces, seed=0)
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(policy.module.get_parameter("head.weight"), std=0.3, generator=generator)
    engine = SimulatorEngine(simulator, policy, retries=0)
    asyncio.run(engine.set_weights(0))
    driver = SimulatorDriver(engine, seed=3, **settings)
    with closing(engine):
        return drive(driver, reset_prompts("counter", 2 if seeds is None else len(seeds), seeds), group_size)


def _steps(groups: Sequence[Group]) -> Iterator[tuple[Trajectory, EnvSteps]]:
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.env_steps is not None
        yield trajectory, trajectory.env_steps


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_with_auto_reset_a_rollout_has_as_many_episodes_as_fit_and_the_last_one_is_cut(num_envs: int) -> None:
    groups = collect(num_envs=num_envs, max_decisions=12, auto_reset=True)
    for group in groups:
        assert [t.sample for t in group.trajectories] == list(range(6))
        assert [t.status for t in group.trajectories] == [
            Status.FINISHED, Status.FINISHED, Status.TRUNCATED,
        ] * 2  # fmt: skip
        lengths = [len(t.env_steps.rewards) for t in group.trajectories if t.env_steps is not None]
        assert lengths == [5, 5, 2] * 2
    starts = {steps.observations["state"][0, 0] for _, steps in _steps(groups)}
    assert len(starts) == 2, "all of a group begin in the same state"
    assert [row.is_terminal for row in rows_of(groups)] == [True, True, False] * 4
    cut = groups[0].trajectories[2].metrics
    assert cut == {"truncated/rollout": 1.0, "success_once": 0.0, "success_at_end": 0.0}, "up to the cut"
    actions = [steps.inputs["actions"].ravel().tolist() for _, steps in _steps(groups[:1])]
    assert len({tuple(episode) for episode in actions}) > 1, "each episode draws its own actions"


def test_results_do_not_depend_on_the_number_of_environments() -> None:
    one, other = (collect(num_envs=n, max_decisions=12, auto_reset=True) for n in (1, 8))
    for (_, left), (_, right) in zip(_steps(one), _steps(other), strict=True):
        np.testing.assert_array_equal(left.observations["state"], right.observations["state"])
        np.testing.assert_array_equal(left.inputs["actions"], right.inputs["actions"])


def test_after_an_end_inside_a_chunk_nothing_of_the_next_episode_is_trained_on() -> None:
    """Chunks of 3 actions, episodes of 5: the second chunk's last action is not executed, and belongs to no
    row."""
    groups = collect(chunk=3, max_decisions=5, auto_reset=True, group_size=1)
    assert [len(group.trajectories) for group in groups] == [3, 3]
    for trajectory, steps in _steps(groups):
        is_cut = trajectory.status is Status.TRUNCATED
        assert steps.num_executed.tolist() == ([3] if is_cut else [3, 2])
        assert steps.rewards.ravel().tolist() == ([1, 4, 9] if is_cut else [1, 4, 9, 16, 25, 0])
    for row in rows_of(groups):
        trained = 3 if not row.is_terminal else 5
        assert row.mask.sum() == trained, "an action of a chunk that was not executed is no position"
        assert row.fields["rewards"].sum() == sum(t**2 for t in range(1, trained + 1))
        assert row.observations["state"][-1, 1] == trained, "the last state is that of the same episode"


def test_without_auto_reset_a_rollout_s_steps_limit_its_episode() -> None:
    groups = collect(max_decisions=3)
    assert all(len(steps.rewards) == 3 and t.status is Status.TRUNCATED for t, steps in _steps(groups))
    whole = collect(max_decisions=LENGTH)
    assert all(t.status is Status.FINISHED for t, _ in _steps(whole)), "it has ended by itself"


def test_a_success_counts_where_the_rollout_cuts_the_episode_later() -> None:
    rules = EpisodeRules(max_episode_steps=8, ignore_terminations=True)
    for cut_after, once in ((LENGTH - 1, 0.0), (LENGTH, 1.0), (LENGTH + 1, 1.0)):
        for trajectory, _ in _steps(collect(rules=rules, max_decisions=cut_after)):
            assert trajectory.metrics["truncated/rollout"] == 1.0
            assert trajectory.metrics["success_once"] == once


def test_an_invalid_episode_ends_its_rollout() -> None:
    groups = collect(fails=True, max_decisions=12, auto_reset=True)
    assert [[t.status for t in group.trajectories] for group in groups] == [[Status.INVALID] * 2] * 2


def test_episodes_that_ignore_terminations_last_until_the_limit_and_remember_success() -> None:
    rules = EpisodeRules(max_episode_steps=8, ignore_terminations=True)
    for trajectory, steps in _steps(collect(rules=rules, chunk=3)):
        assert steps.num_executed.sum() == 8
        assert trajectory.status is Status.TRUNCATED, "the last state's value counts"
        assert trajectory.metrics == {"success_once": 1.0, "success_at_end": 0.0}
    for trajectory, steps in _steps(collect(rules=EpisodeRules(max_episode_steps=8), chunk=3)):
        assert steps.num_executed.sum() == LENGTH
        assert trajectory.metrics == {"success_once": 1.0, "success_at_end": 1.0}


def test_rewards_are_scaled_and_differences() -> None:
    scaled = [
        steps.rewards.ravel().tolist() for _, steps in _steps(collect(rules=EpisodeRules(reward_scale=2.0)))
    ]
    assert scaled == [[2, 8, 18, 32, 50]] * 4
    rules = EpisodeRules(relative_reward=True, reward_scale=2.0)
    groups = collect(rules=rules, max_decisions=10, auto_reset=True)
    relative = [steps.rewards.ravel().tolist() for _, steps in _steps(groups)]
    assert relative == [[2, 6, 10, 14, 18]] * 8, "also in the second episode of a slot"
    assert {t.reward for t, _ in _steps(groups)} == {50.0}
    for is_relative, expected in ((False, [-1, 2, 7, 14, 23]), (True, [-1, 3, 5, 7, 9])):
        rules = EpisodeRules(step_penalty=2.0, relative_reward=is_relative)
        penalised = [steps.rewards.ravel().tolist() for _, steps in _steps(collect(rules=rules))]
        assert penalised == [expected] * 4, "the first difference is to 0"


def _seeds(groups: Sequence[Group]) -> list[list[int]]:
    return [[int(steps.observations["state"][0, 0]) for _, steps in _steps([group])] for group in groups]


def test_groups_begin_in_the_states_that_are_given_or_each_episode_in_its_own() -> None:
    assert _seeds(collect(seeds=[7, 7, 4])) == [[7, 7], [7, 7], [4, 4]]
    seeds = _seeds(collect(shares_reset=False, max_decisions=10, auto_reset=True))
    assert len({seed for group in seeds for seed in group}) == 2 * 2 * 2
    assert seeds == _seeds(collect(shares_reset=False, max_decisions=10, auto_reset=True, num_envs=1))


def _env(**settings: Any) -> SimulatorEnv:
    return GymnasiumEnv(kind="gymnasium", id="CartPole-v1", **settings)


def test_reset_states_are_those_of_the_config() -> None:
    def reset_seeds(env: SimulatorEnv) -> list[list[Any]]:
        return [[p.fields.get("reset_seed") for p in prompts] for prompts in env.reset_states().values()]

    assert reset_seeds(_env(reset_seeds=3, eval_reset_seeds=(5,))) == [[0, 1, 2], [5]]
    train, evaluated = reset_seeds(_env(eval_episodes=4))
    assert set(train) == {None}
    assert evaluated == [None] * 4


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ("auto_reset: true", "auto_reset=true needs the length of a rollout; set max_steps_per_rollout"),
        ("ignore_terminations: true", "ignore_terminations=true needs a time limit; set max_episode_steps"),
        ("reset_seeds: []", "reset_seeds is empty; name at least one seed, or set it to null"),
        ("reset_seeds: 3, fixed_reset_states: false", "those of whole groups; set fixed_reset_states=true"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(env: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, ["model={mlp: {}}", f"env={{kind: gymnasium, id: CartPole-v1, {env}}}"])


def test_the_return_goes_on_with_the_last_state_s_value_after_time_limits_or_every_end() -> None:
    """One step with reward r: A = r - V_0, plus gamma V_1 where the return goes on."""

    def advantage(bootstrap: Any, *, is_terminal: bool) -> float:
        (row, *_) = rows_of(collect(group_size=1, rules=EpisodeRules(max_episode_steps=1)))
        row.is_terminal = is_terminal
        row.fields["values"] = np.array([0.25, 8.0], np.float32)
        compute_advantages([row], Recipe(advantage=advantage_of("gae", gamma=0.5, bootstrap=bootstrap)))
        return float(row.fields["advantages"][0])

    assert advantage("truncated", is_terminal=True) == 1 - 0.25
    assert advantage("truncated", is_terminal=False) == 1 - 0.25 + 0.5 * 8
    assert advantage("always", is_terminal=True) == 1 - 0.25 + 0.5 * 8
