"""Small trajectories for reports."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from braid.types import EnvSteps, Group, Prompt, Row, Segment, Status, Trajectory, Turn

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture
def decode() -> Callable[..., str]:
    """Token ids below ten to words."""
    return lambda ids: " ".join(WORDS[i] for i in ids)


@pytest.fixture
def groups() -> list[Group]:
    """A text group of two turns and one failure, and a simulator's group."""
    prompt = Prompt(
        "sums:7",
        "sums",
        (1, 2),
        ({"role": "user", "content": "1 + 2 ="},),
        {"answer": "3", "tags": [1, None], "when": {1, 2}},
    )
    turns = [
        Turn([1, 2], [3, 4], [-0.5, -0.25], "stop", policy_version=2, reward=0.5, start_s=1.0, end_s=2.5),
        Turn([5], [6, 7, 8], [-1.0, float("nan"), -2.0], "length", ((3, 1), (4, 2)), env_s=0.5, tool_s=0.25),
    ]
    good = Trajectory(
        prompt,
        0,
        Status.TRUNCATED,
        segments=[Segment(turns)],
        text="three four five six",
        answer_text="six\x1b[31m",
        sampled_text="five?</think>six\x1b[31m",
        prefill="<think>",
        reasoning_text="five?",
        reward=1.5,
        reward_parts={"exact": 1.0},
        metrics={"tool_calls": 1.0},
        attempts=2,
    )
    bad = Trajectory(prompt, 1)
    bad.invalidate("reward exact: timed out after 1 s")
    steps = EnvSteps(
        observations={
            "state": np.arange(6, dtype=np.float32).reshape(3, 2) / 3,
            "image": np.zeros((3, 2, 2, 3), np.uint8),
        },
        inputs={"actions": np.array([[0], [1]])},
        logprobs=np.array([[-0.1], [-0.2]], np.float32),
        rewards=np.array([[1], [1]], np.float32),
        num_executed=np.ones(2, np.int32),
        policy_version=1,
    )
    reset = Prompt("CartPole-v1:3", "CartPole-v1", (), ())
    return [Group(prompt, [good, bad]), Group(reset, [Trajectory(reset, 0, env_steps=steps, reward=2.0)])]


@pytest.fixture
def rows() -> list[Row]:
    """Training rows of the first and the third trajectory."""
    text = np.array([False, False, True, True, False, True, True, True])
    env = np.array([True, True, False])
    return [
        Row({}, text, group=0, trajectory=0, fields={"advantages": text * np.float32(0.1)}),
        Row({}, env, group=1, trajectory=2, fields={"advantages": np.array([1, -1, 0], np.float32)}),
    ]
