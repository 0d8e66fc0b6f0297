"""Returns and values of the actions of a chunk (algorithm.reward_level=action)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.formulas import advantage_of
from tests.rollout_drivers.test_simulator_semantics import collect
from tests.rows import rows_of

from braid.algorithms.aggregate import row_weights
from braid.algorithms.recipes import Recipe
from braid.config.load import load_config
from braid.models.roles import make_robot_model
from braid.models.value_head import ValueHead
from braid.plan.resolve import merge_recipe
from braid.training.advantages import compute_advantages
from braid.training.losses import value_loss_of
from braid.training.packing import pack
from braid.types import ActionSpace, Row, Spaces

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
    assert merge_recipe(config, has_gpus=False).value_level == "action"
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
    compute_advantages([row], Recipe(advantage=advantage_of("gae", gamma=0.5, gae_lambda=0.5)))
    rewards, advantage, expected = [1.0, 4, 9, 16, 25], 0.0, [0.0] * 5
    for t in reversed(range(5)):
        following = values[t + 1] if t < 4 else 0.0  # the task itself ended
        advantage = rewards[t] + 0.5 * following - values[t] + 0.25 * advantage
        expected[t] = advantage
    np.testing.assert_allclose(row.fields["advantages"][:5], expected, rtol=1e-6)  # float32


def _in_components(row: Row, size: int = 2) -> Row:
    """The same row with a position for each of `size` components of an action, the last of which has the
    reward."""
    counts = np.where(row.mask, size, 1)
    is_last = np.ones(int(counts.sum()), np.bool_)
    is_last[:-1] = (
        np.repeat(np.arange(len(counts)), counts)[1:] != np.repeat(np.arange(len(counts)), counts)[:-1]
    )
    fields = {name: np.repeat(values, counts) for name, values in row.fields.items()}
    fields["rewards"] = fields["rewards"] * is_last
    return replace(
        row,
        inputs={name: np.repeat(values, counts, axis=0) for name, values in row.inputs.items()},
        mask=np.repeat(row.mask, counts),
        decision=np.repeat(row.decision, counts),
        policy_versions=np.repeat(row.policy_versions, counts),
        fields=fields,
        action_size=size,
    )


def test_components_of_an_action_share_its_return_and_its_value_counts_once() -> None:
    recipe = Recipe(advantage=advantage_of("gae", level="action", gamma=0.5, gae_lambda=0.5))
    rows = [row for row in rows_of(collect(chunk=CHUNK, group_size=2)) if len(row)]
    for row in rows:
        row.fields["values"] = np.random.default_rng(0).normal(size=len(row)).astype(np.float32)
    split = [_in_components(row) for row in rows]
    for variant in (rows, split):
        assert compute_advantages(variant, recipe) == pytest.approx(compute_advantages(rows, recipe))
    losses = []
    for variant in (rows, split):
        weights = row_weights(
            [row.num_actions for row in variant], [0] * len(variant), mode="token_mean", constant=None
        )
        batch = pack(variant, torch.device("cpu"), weights=weights)
        values = batch.fields["values"] + 1
        loss, diagnostics = value_loss_of(recipe).compute(
            {"values": values, "value_deviation": torch.ones_like(values)}, batch
        )
        losses.append((float(loss), *map(float, diagnostics.means["critic/return_mean"])))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # float32
    for whole, parts in zip(rows, split, strict=True):
        for name in ("advantages", "returns"):
            at_actions = np.where(whole.mask, whole.fields[name], 0)
            np.testing.assert_array_equal(
                np.where(parts.mask, parts.fields[name], 0), np.repeat(at_actions, np.where(whole.mask, 2, 1))
            )


def test_components_of_an_action_have_the_value_of_its_place_in_the_chunk() -> None:
    head = ValueHead(4, num_values=CHUNK)
    (row, *_) = rows_of(collect(chunk=CHUNK, group_size=1))
    batch = pack([_in_components(row)], torch.device("cpu"))
    each = torch.arange(9.0).view(3, CHUNK)
    values = head.of_positions(each, batch)
    assert values.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 6]
