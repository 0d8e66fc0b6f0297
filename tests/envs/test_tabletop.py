from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from examples.tabletop import HOLDING, Tabletop, expert
from gymnasium.utils.env_checker import check_env


def _played(env: Any, seed: int) -> tuple[list[Any], list[float], bool]:
    """Observations, rewards and success of the expert's episode."""
    observations, rewards, is_over, info = [env.reset(seed=seed)[0]], [], False, {"success": False}
    while not is_over:
        observation, reward, is_terminated, is_truncated, info = env.step(expert(env))
        observations.append(observation)
        rewards.append(reward)
        is_over = is_terminated or is_truncated
    return observations, rewards, info["success"]


@pytest.mark.parametrize("images", [True, False])
def test_it_is_a_gymnasium_environment(images: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*alternative render modes.*")
        check_env(Tabletop(images=images))


def test_the_expert_succeeds_in_every_episode() -> None:
    env = Tabletop(images=False)
    assert all(_played(env, seed)[2] for seed in range(500))


def test_the_seed_of_a_reset_decides_the_episode_whatever_came_before() -> None:
    env = Tabletop()
    first, rewards, _ = _played(env, 3)
    _played(env, 4)
    again, rewards_again, _ = _played(env, 3)
    fresh, rewards_fresh, _ = _played(Tabletop(), 3)
    assert rewards == rewards_again == rewards_fresh
    for one, other, new in zip(first, again, fresh, strict=True):
        assert one["instruction"] == other["instruction"] == new["instruction"]
        for name in ("image", "state"):
            np.testing.assert_array_equal(one[name], other[name])
            np.testing.assert_array_equal(one[name], new[name])
    texts = {env.reset(seed=seed)[0]["instruction"] for seed in range(30)}
    assert len(texts) > 10


def test_shaped_rewards_add_up_to_the_way_and_the_success() -> None:
    env = Tabletop(images=False)
    start = np.array(env.reset(seed=5)[0]["state"], np.float64)
    observations, rewards, _ = _played(env, 5)
    gripper, block, plate = start[:2], start[4:6], start[6:8]
    way = np.linalg.norm(gripper - block) + np.linalg.norm(block - plate)
    end = observations[-1]["state"]
    left = np.linalg.norm(end[:2] - end[4:6]) + np.linalg.norm(end[4:6] - end[6:8])
    assert sum(rewards) == pytest.approx(1 + way - left, abs=1e-6), "states are float32: 6e-8 each"
    assert sum(_played(Tabletop(reward="sparse"), 5)[1]) == 1.0


def test_grasping_the_named_block_is_rewarded_and_letting_it_go_costs_as_much() -> None:
    env = Tabletop(num_blocks=2, images=False)
    env.reset(seed=0)
    stay = np.zeros(2)
    for block, reward in ((env.block, HOLDING), (1 - env.block, 0.0)):
        env.gripper = env.blocks[block].copy()
        env.step(np.array([*stay, -1.0]))
        assert env.step(np.array([*stay, 1.0]))[1] == pytest.approx(reward)
        assert env.step(np.array([*stay, -1.0]))[1] == pytest.approx(-reward)


def test_the_image_shows_where_things_are() -> None:
    env = Tabletop(num_blocks=1, num_plates=1)
    image = env.reset(seed=0)[0]["image"]
    env.blocks[0] = env.gripper = np.array([0.1, 0.9])
    moved = env.render()
    x, y = (np.array([0.1, 0.9]) * 63 + 0.5).astype(int)
    assert moved[y, x].tolist() != image[y, x].tolist(), (
        "the first axis of a place is the column, the second the row"
    )
