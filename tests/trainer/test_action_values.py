"""Returns and values of the actions of a chunk (algorithm.reward_level=action)."""

from __future__ import annotations

import numpy as np
import torch
from tests.rollout_drivers.test_simulator_semantics import collect
from tests.rows import rows_of

from braid.algorithms.recipes import Recipe
from braid.config.load import load_config
from braid.models.roles import make_robot_model
from braid.plan.resolve import merge_recipe
from braid.training.advantages import compute_advantages
from braid.training.packing import pack
from braid.types import ActionSpace, Spaces

CHUNK = 3


def test_each_action_has_the_value_of_its_place_in_the_chunk() -> None:
    config = load_config(
        None,
        [
            f"model.mlp={{num_action_chunks: {CHUNK}}}",
            "env={kind: gymnasium, id: CartPole-v1}",
            "algorithm={recipe: ppo, reward_level: action}",
        ],
    ).config
    assert not merge_recipe(config, has_gpus=False).values_turns
    spaces = Spaces(2, ActionSpace("discrete", 2))
    critic = make_robot_model("critic", config, spaces, torch.device("cpu"))
    (row, *_) = rows_of(collect(chunk=CHUNK, group_size=1))  # 5 env steps: chunks of 3 and 2 actions
    batch = pack([row], torch.device("cpu"))
    values = critic.forward(batch, frozenset({"values"}))["values"]
    each = critic.module(batch.observations)
    assert each.shape == (3, CHUNK), "two decisions and the final observation"
    expected = [each[0, 0], each[0, 1], each[0, 2], each[1, 0], each[1, 1], each[2, 0]]
    torch.testing.assert_close(values, torch.stack(expected), rtol=0, atol=0)


def test_returns_are_those_of_actions() -> None:
    """gae with gamma = lambda = 1/2 over the five actions of two chunks, by hand."""
    (row, *_) = rows_of(collect(chunk=CHUNK, group_size=1))
    values = np.array([1, 2, 3, 4, 5, 6], np.float32)
    row.fields["values"] = values
    compute_advantages([row], Recipe(advantage="gae", gamma=0.5, gae_lambda=0.5))
    rewards, advantage, expected = [1.0, 4, 9, 16, 25], 0.0, [0.0] * 5
    for t in reversed(range(5)):
        following = values[t + 1] if t < 4 else 0.0  # the task itself ended
        advantage = rewards[t] + 0.5 * following - values[t] + 0.25 * advantage
        expected[t] = advantage
    np.testing.assert_allclose(row.fields["advantages"][:5], expected, rtol=1e-6)  # float32
