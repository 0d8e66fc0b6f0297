"""Reward shaping, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from braid.config.reward import OverlongConfig, RewardConfig
from braid.rewards.shaping import has_shaping, overlong_penalty, shape_reward
from braid.types import Prompt, Segment, ShapedReward, Status, Trajectory, Turn

PROMPT = Prompt("test:0", "test", (1,), ())


def _trajectory(reward: float, *lengths: int, status: Status = Status.FINISHED) -> Trajectory:
    """An answer with turns of these lengths."""
    turns = [Turn([1], [2] * n, [-1.0] * n, "stop", 0) for n in lengths]
    return Trajectory(PROMPT, 0, status, segments=[Segment(turns)], reward=reward)


def _shaped(trajectory: Trajectory, **settings: object) -> ShapedReward:
    return shape_reward(trajectory, RewardConfig(**settings), max_new_tokens=20)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("lengths", "penalty"),
    [
        ((1,), 0.0),
        ((16,), 0.0),  # 20 - 4
        ((17,), 0.5),
        ((18,), 1.0),
        ((20,), 2.0),
        ((10, 18, 3), 1.0),  # the longest turn
        ((10, 10), 0.0),  # each turn has a limit of its own
        ((), 0.0),
    ],
)
def test_the_penalty_of_length_grows_over_the_buffer(lengths: tuple[int, ...], penalty: float) -> None:
    config = OverlongConfig(buffer_tokens=4, penalty=2.0)
    assert overlong_penalty(_trajectory(1.0, *lengths), config, 20) == penalty


def test_a_truncated_trajectory_has_no_turn_rewards_either() -> None:
    cut = _trajectory(0.7, 20, status=Status.TRUNCATED)
    assert _shaped(cut, truncated="zero") == ShapedReward(0.0, 0.0)
    assert _shaped(cut, truncated="keep") == ShapedReward(0.7)
    assert _shaped(_trajectory(0.7, 20), truncated="zero") == ShapedReward(0.7)


def test_the_steps_follow_each_other_in_the_order_that_the_config_states() -> None:
    """Zeroed, 0 - 1 for length, times 3, plus 0.5, not below -2."""
    settings = {"truncated": "zero", "overlong": {"buffer_tokens": 4}, "scale": 3.0, "shift": 0.5}
    cut = _trajectory(9.0, 20, status=Status.TRUNCATED)
    assert _shaped(cut, **settings) == ShapedReward(-2.5, 0.0)
    assert _shaped(cut, **settings, clip=2.0) == ShapedReward(-2.0, 0.0)
    assert _shaped(_trajectory(0.5, 18), **settings, clip=2.0) == ShapedReward(0.5, 3.0)


def test_the_reward_itself_is_left_as_it_was_scored() -> None:
    trajectory = _trajectory(0.5, 3)
    trajectory.shaped = _shaped(trajectory, scale=4.0)
    assert (trajectory.reward, trajectory.training_reward) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("settings", "is_so"),
    [
        ({}, False),
        ({"timeout_s": 1.0}, False),
        ({"truncated": "zero"}, True),
        ({"overlong": {"buffer_tokens": 1}}, True),
        ({"scale": 2.0}, True),
        ({"shift": 1.0}, True),
        ({"clip": 1.0}, True),
    ],
)
def test_is_shaping_only_if_the_config_shapes(settings: dict[str, object], is_so: bool) -> None:
    assert has_shaping(RewardConfig(**settings)) is is_so  # pyright: ignore[reportArgumentType]
