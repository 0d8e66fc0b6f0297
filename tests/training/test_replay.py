"""The replay buffer: which transitions an episode has, how the ring overwrites them, and its state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braid.data.lerobot import Demonstration, write_demonstrations
from braid.errors import DataError
from braid.training.replay import ReplayBuffer, Transitions, read_transitions
from braid.types import ActionSpace, EnvSteps, Prompt, ShapedReward, Spaces, Status, Trajectory


def trajectory(
    first: int, num_decisions: int, status: Status, *, chunk: int = 1, last: int = 1
) -> Trajectory:
    """An episode whose observation after d decisions is first + d, with action and reward first + d; of its
    last chunk `last` actions were executed."""
    num = np.arange(first, first + num_decisions, dtype=np.float32)
    executed = np.full(num_decisions, chunk, np.int32)
    executed[-1] = last
    steps = EnvSteps(
        observations={"state": np.arange(first, first + num_decisions + 1, dtype=np.float32)[:, None]},
        inputs={"actions": np.tile(num[:, None, None, None], (1, 1, chunk, 1))},
        logprobs=np.zeros((num_decisions, 1), np.float32),
        rewards=np.tile(num[:, None], (1, chunk)),
        num_executed=executed,
        policy_version=0,
    )
    prompt = Prompt(uid="it:0", source="it", token_ids=(), messages=(), fields={})
    return Trajectory(prompt, 0, status, env_steps=steps, reward=float(num.sum()))


def demonstration(num_frames: int, *, is_done: bool) -> Demonstration:
    """Frame s has the state s, the action s / 10 and the reward s."""
    frames = np.arange(num_frames, dtype=np.float32)
    return Demonstration(
        {"state": frames[:, None]}, (frames[:, None] / 10).astype(np.float32), "", frames, is_done
    )


SPACES = Spaces(1, ActionSpace("continuous", 1))


def test_demonstrations_become_transitions_and_only_a_done_one_keeps_its_last_decision(
    tmp_path: Path,
) -> None:
    write_demonstrations(tmp_path, [demonstration(3, is_done=True), demonstration(3, is_done=False)])
    done, cut = read_transitions(tmp_path, "sac.demonstrations", SPACES, 1)
    assert done.rewards.tolist() == [0, 1, 2]
    assert done.is_terminated.tolist() == [False, False, True]
    assert cut.rewards.tolist() == [0, 1]
    assert not cut.is_terminated.any()
    for episode in (done, cut):
        assert episode.next_observations["state"].ravel().tolist()[:2] == [1, 2]


def test_chunks_of_demonstrations_sum_rewards_and_repeat_the_last_action(tmp_path: Path) -> None:
    write_demonstrations(tmp_path, [demonstration(5, is_done=True)])
    (episode,) = read_transitions(tmp_path, "sac.demonstrations", SPACES, 2)
    assert episode.rewards.tolist() == [0 + 1, 2 + 3, 4]
    assert episode.actions.ravel().tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert episode.observations["state"].ravel().tolist() == [0, 2, 4]
    assert episode.is_terminated.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rewards": None}, "next.reward"),
        ({"actions": np.full((3, 1), 2.0, np.float32)}, "between -1 and 1"),
        ({"observations": {"state": np.zeros((3, 2), np.float32)}}, "record them in this environment"),
    ],
)
def test_demonstrations_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    write_demonstrations(tmp_path, [replace(demonstration(3, is_done=True), **change)])
    with pytest.raises(DataError, match=reason):
        list(read_transitions(tmp_path, "sac.demonstrations", SPACES, 1))


def drawn(buffer: ReplayBuffer, count: int = 400) -> Transitions:
    return buffer.draw(np.random.default_rng(0), count)


@pytest.mark.parametrize("status", [Status.FINISHED, Status.TRUNCATED])
def test_only_the_last_decision_of_a_terminated_episode_is_terminal(status: Status) -> None:
    episode = Transitions.of(trajectory(10, 3, status))
    assert episode.observations["state"].ravel().tolist() == [10, 11, 12]
    assert episode.next_observations["state"].ravel().tolist() == [11, 12, 13]
    assert episode.is_terminated.tolist() == [False, False, status is Status.FINISHED]


def test_the_reward_of_a_chunk_is_the_sum_over_executed_actions() -> None:
    episode = Transitions.of(trajectory(1, 3, Status.FINISHED, chunk=4, last=2))
    assert episode.rewards.tolist() == [4 * 1, 4 * 2, 2 * 3]
    assert episode.actions.tolist() == [[1] * 4, [2] * 4, [3] * 4]


def test_shaping_scales_rewards_and_adds_the_rest_to_the_last() -> None:
    shaped = trajectory(1, 3, Status.FINISHED)
    shaped.shaped = ShapedReward(total=0.5 * 6 - 2, factor=0.5)
    assert Transitions.of(shaped).rewards.tolist() == [0.5, 1.0, 1.5 - 2]


def test_no_transition_leads_from_one_episode_into_another() -> None:
    buffer = ReplayBuffer(100)
    for first in (0, 100, 200):
        buffer.add(Transitions.of(trajectory(first, 5, Status.TRUNCATED)))
    assert len(buffer) == 15
    batch = drawn(buffer)
    before, after = batch.observations["state"], batch.next_observations["state"]
    assert set(before.ravel()) == {first + d for first in (0, 100, 200) for d in range(5)}
    assert (after - before == 1).all()
    assert (batch.actions == before).all()
    assert (batch.rewards == before[:, 0]).all()


def test_new_episodes_overwrite_the_oldest_decisions_and_no_others() -> None:
    buffer = ReplayBuffer(10)
    for first in (0, 100, 200):
        buffer.add(Transitions.of(trajectory(first, 3, Status.FINISHED)))
    # 4 observations each: of the first episode those of decision 2, and its end, remain
    batch = drawn(buffer)
    assert set(batch.rewards.tolist()) == {2.0, 100.0, 101.0, 102.0, 200.0, 201.0, 202.0}
    assert len(buffer) == 7
    assert (batch.next_observations["state"] - batch.observations["state"] == 1).all()
    assert {float(r) for r, done in zip(batch.rewards, batch.is_terminated, strict=True) if done} == {
        2,
        102,
        202,
    }


def test_of_an_episode_longer_than_the_buffer_the_last_decisions_are_kept() -> None:
    buffer = ReplayBuffer(4)
    buffer.add(Transitions.of(trajectory(0, 9, Status.FINISHED)))
    batch = drawn(buffer)
    assert set(batch.rewards.tolist()) == {6.0, 7.0, 8.0}
    assert set(batch.rewards[batch.is_terminated].tolist()) == {8.0}


@pytest.mark.parametrize("capacity", [100, 10])
def test_a_restored_buffer_draws_and_overwrites_the_same(capacity: int) -> None:
    buffer, restored = ReplayBuffer(capacity), ReplayBuffer(capacity)
    for first in (0, 100, 200):
        buffer.add(Transitions.of(trajectory(first, 3, Status.TRUNCATED)))
    restored.load(buffer.state())
    for either in (buffer, restored):
        either.add(Transitions.of(trajectory(300, 2, Status.FINISHED)))
    assert len(buffer) == len(restored)
    first, second = drawn(buffer), drawn(restored)
    assert (first.rewards == second.rewards).all()
    assert (first.next_observations["state"] == second.next_observations["state"]).all()


def test_a_smaller_buffer_restores_the_newest_decisions() -> None:
    buffer, restored = ReplayBuffer(100), ReplayBuffer(5)
    for first in (0, 100):
        buffer.add(Transitions.of(trajectory(first, 3, Status.TRUNCATED)))
    restored.load(buffer.state())
    assert set(drawn(restored).rewards.tolist()) == {100.0, 101.0, 102.0}
