from __future__ import annotations

import numpy as np
import pytest
from tests.rows import rows_of

from braid.types import EnvSteps, Group, Prompt, Segment, ShapedReward, Status, Trajectory, Turn

PROMPT = Prompt("test:0", "test", (1, 2), ())


def _text(reward: float | None = 1.0, *, turn_rewards: tuple[float, float] = (0.0, 0.0)) -> Trajectory:
    turns = [
        Turn([1, 2], [3, 4], [-0.1, -0.2], "stop", 0, turn_rewards[0]),
        Turn([5], [6], [-0.3], "stop", 1, turn_rewards[1]),
    ]
    return Trajectory(PROMPT, 0, segments=[Segment(turns)], reward=reward)


def _episode(status: Status) -> Trajectory:
    steps = EnvSteps(
        observations={"state": np.arange(8, dtype=np.float32).reshape(4, 2)},
        inputs={"actions": np.array([[1], [0], [1]])},
        logprobs=np.array([[-0.1], [-0.2], [-0.3]], np.float32),
        rewards=np.array([[1.0], [2.0], [4.0]], np.float32),
        num_executed=np.ones(3, np.int32),
        policy_version=3,
    )
    return Trajectory(PROMPT, 0, status, env_steps=steps, reward=7.0)


def test_a_text_row_is_turns_and_replies_end_to_end() -> None:
    (row,) = rows_of([Group(PROMPT, [_text()])])
    assert row.inputs["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert row.mask.tolist() == [False, False, True, True, False, True]
    np.testing.assert_array_equal(
        row.fields["behavior_logprobs"], np.array([0, 0, -0.1, -0.2, 0, -0.3], np.float32)
    )
    assert row.fields["rewards"].tolist() == [0, 0, 0, 0, 0, 1.0]
    assert row.decision.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.policy_versions.tolist() == [0, 0, 0, 0, 0, 1]
    assert row.is_terminal


def test_turns_without_a_reply_between_them_are_two_decisions() -> None:
    trajectory = _text()
    trajectory.turns[1].context_ids = []
    (row,) = rows_of([Group(PROMPT, [trajectory])])
    assert row.decision.tolist() == [-1, -1, 0, 0, 1]
    assert row.num_decisions == 2


def test_tokens_of_a_turn_whose_weights_changed_know_their_version() -> None:
    trajectory = _text()
    trajectory.turns[0].policy_version = ((4, 1), (5, 1))
    (row,) = rows_of([Group(PROMPT, [trajectory])])
    assert row.policy_versions.tolist() == [0, 0, 4, 5, 0, 1]


def test_each_segment_is_a_row_of_its_agent() -> None:
    first, second = _text().turns
    segments = [Segment([first], "lead"), Segment([second], "helper"), Segment([first], "lead"), Segment()]
    rows = rows_of([Group(PROMPT, [_text(), Trajectory(PROMPT, 1, segments=segments, reward=1.0)])])
    assert [row.inputs["input_ids"].tolist() for row in rows[1:]] == [[1, 2, 3, 4], [5, 6], [1, 2, 3, 4]]
    assert [(row.trajectory, row.agent) for row in rows] == [(0, 0), (1, 0), (1, 1), (1, 0)]
    assert [row.decision.tolist() for row in rows[1:]] == [[-1, -1, 0, 0], [-1, 0], [-1, -1, 0, 0]]


def test_the_rewards_of_all_segments_sum_to_that_of_the_trajectory() -> None:
    first, second = _text(turn_rewards=(0.5, 1.0)).turns
    trajectory = Trajectory(PROMPT, 0, segments=[Segment([first]), Segment([second])], reward=5.0)
    trajectory.shaped = ShapedReward(total=9.0, factor=2.0)
    rows = rows_of([Group(PROMPT, [trajectory])])
    assert [row.fields["rewards"].tolist() for row in rows] == [[0, 0, 0, 1.0], [0, 8.0]]
    assert [row.score for row in rows] == [5.0, 5.0]


def test_agents_with_rewards_of_their_own_have_rows_that_sum_to_them() -> None:
    first, second = _text(turn_rewards=(1.0, -1.0)).turns
    trajectory = Trajectory(PROMPT, 0, segments=[Segment([first], "a"), Segment([second], "b")], reward=0.5)
    trajectory.agent_rewards = {"a": 1.0, "b": -1.0}
    trajectory.shaped = ShapedReward(total=1.0, factor=2.0)
    assert trajectory.training_rewards == {"a": 3.0, "b": -1.0}
    rows = rows_of([Group(PROMPT, [trajectory], greedy=trajectory)])
    assert [row.fields["rewards"].tolist() for row in rows] == [[0, 0, 0, 3.0], [0, -1.0]]
    assert [(row.player, row.score, row.baseline) for row in rows] == [("a", 1.5, 3.0), ("b", -0.5, -1.0)]


def test_turn_rewards_are_at_the_ends_of_turns_and_the_rest_at_the_last() -> None:
    (row,) = rows_of([Group(PROMPT, [_text(5.0, turn_rewards=(0.5, 1.0))])])
    assert row.fields["rewards"].tolist() == [0, 0, 0, 0.5, 0, 4.5]


def test_a_truncated_text_is_terminal() -> None:
    trajectory = _text()
    trajectory.status = Status.TRUNCATED
    (row,) = rows_of([Group(PROMPT, [trajectory])])
    assert row.is_terminal
    assert row.is_truncated


@pytest.mark.parametrize(("status", "is_terminal"), [(Status.FINISHED, True), (Status.TRUNCATED, False)])
def test_an_episode_row_has_the_final_observation_masked_out(status: Status, is_terminal: bool) -> None:
    (row,) = rows_of([Group(PROMPT, [_episode(status)])])
    assert row.observations["state"].shape == (4, 2)
    assert row.observed.tolist() == [0, 1, 2, 3]
    assert row.inputs["actions"].tolist() == [1, 0, 1, 0]
    assert row.mask.tolist() == [True, True, True, False]
    assert row.decision.tolist() == [0, 1, 2, -1]
    assert row.policy_versions.tolist() == [3, 3, 3, 0]
    assert row.fields["rewards"].tolist() == [1, 2, 4, 0]
    assert row.fields["behavior_logprobs"][-1] == 0
    assert row.is_terminal is is_terminal
    assert row.is_truncated is not is_terminal


def test_rewards_of_parts_are_at_the_last_action() -> None:
    trajectory = _episode(Status.FINISHED)
    trajectory.reward = 10.0
    (row,) = rows_of([Group(PROMPT, [trajectory])])
    assert row.fields["rewards"].tolist() == [1, 2, 7, 0]


def test_shaping_multiplies_rewards_on_the_way_and_settles_the_sum_at_the_last_position() -> None:
    trajectory = _text(5.0, turn_rewards=(0.5, 1.0))
    trajectory.shaped = ShapedReward(total=9.0, factor=2.0)
    (row,) = rows_of([Group(PROMPT, [trajectory])])
    assert row.fields["rewards"].tolist() == [0, 0, 0, 1.0, 0, 8.0]
    assert trajectory.turns[0].reward == 0.5


def test_rows_have_the_reward_of_their_groups_greedy_answer_as_training_sees_it() -> None:
    greedy = _text(0.25)
    greedy.shaped = ShapedReward(total=0.5)
    rows = rows_of([Group(PROMPT, [_text(), _text()], greedy), Group(PROMPT, [_text()])])
    assert [(row.group, row.trajectory, row.baseline) for row in rows] == [
        (0, 0, 0.5),
        (0, 1, 0.5),
        (1, 2, None),
    ]


def test_invalid_trajectories_give_no_row_and_keep_their_numbers() -> None:
    bad = _text()
    bad.invalidate("environment: broken")
    groups = [Group(PROMPT, [_text(), bad]), Group(PROMPT, [bad]), Group(PROMPT, [bad, _text()])]
    assert [(r.group, r.trajectory) for r in rows_of(groups)] == [(0, 0), (2, 4)]


def test_rows_do_not_share_memory_with_their_episodes() -> None:
    trajectory = _episode(Status.FINISHED)
    (row,) = rows_of([Group(PROMPT, [trajectory])])
    row.fields["rewards"][0] = 99.0
    assert trajectory.env_steps is not None
    assert trajectory.env_steps.rewards[0] == 1.0


def test_a_trajectory_that_was_not_scored_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="test:0/0 is not scored"):
        rows_of([Group(PROMPT, [_text(None)])])
