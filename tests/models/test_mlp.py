from __future__ import annotations

from dataclasses import replace
from math import log, pi
from typing import Any

import numpy as np
import pytest
import torch
from tests.rounding import assert_near, rounding
from tests.rows import rows_of

from braid.config.model import MlpSpec
from braid.errors import ConfigError, ModelError
from braid.models.batch import PackedBatch
from braid.models.mlp import MlpPolicy, MlpValue
from braid.training.packing import pack
from braid.types import ActionSpace, DecisionLevel, EnvSteps, Group, Prompt, Spaces, Trajectory

SPEC = MlpSpec(hidden_sizes=(16, 16))
KINDS = [ActionSpace("discrete", 3), ActionSpace("continuous", 2)]


def _policy(actions: ActionSpace, seed: int = 0) -> MlpPolicy:
    """A policy that is not close to uniform, as the usual initialization is."""
    policy = MlpPolicy(SPEC, Spaces(4, actions), seed=seed)
    torch.nn.init.normal_(
        policy.module.get_parameter("head.weight"), generator=torch.Generator().manual_seed(seed)
    )
    return policy


def _act(policy: MlpPolicy, states: np.ndarray, numbers: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Single actions, and their log-probs."""
    acted = policy.act({"state": states}, numbers)
    np.testing.assert_array_equal(acted.inputs["actions"], acted.actions)
    return acted.actions[:, 0], acted.logprobs[:, 0]


def _batch(observations: np.ndarray, actions: np.ndarray, mask: np.ndarray) -> PackedBatch:
    return PackedBatch(
        {"actions": torch.from_numpy(actions)},
        torch.from_numpy(mask),
        lengths=(len(mask),),
        observations={"state": torch.from_numpy(observations)},
        observed=torch.arange(len(mask)),
        decision=torch.where(torch.from_numpy(mask), torch.arange(len(mask)), -1),
    )


@pytest.mark.parametrize("actions", KINDS, ids=lambda a: a.kind)
def test_acting_and_training_give_the_same_logprobs(actions: ActionSpace) -> None:
    policy = _policy(actions)
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(40, 4)).astype(np.float32)
    drawn, logprobs = _act(policy, observations, rng.random((40, policy.num_uniforms)))
    mask = np.arange(40) != 39
    out = policy.forward(_batch(observations, drawn, mask), frozenset({"logprobs", "entropy"}))
    np.testing.assert_allclose(
        out["logprobs"].detach().numpy()[:39], logprobs[:39], atol=1e-6
    )  # fp32 rounding
    assert out["logprobs"][39] == 0
    assert out["entropy"][39] == 0


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_binned_actions_are_values_from_minus_1_to_1_with_the_same_logprobs_in_training(
    level: DecisionLevel,
) -> None:
    spec = MlpSpec(hidden_sizes=(16,), num_bins=5, num_action_chunks=3)
    policy = MlpPolicy(spec, Spaces(4, KINDS[1]), seed=0, level=level)
    torch.nn.init.normal_(
        policy.module.get_parameter("head.weight"), generator=torch.Generator().manual_seed(0)
    )
    rng = np.random.default_rng(0)
    states = rng.normal(size=(20, 4)).astype(np.float32)
    acted = policy.act({"state": states}, rng.random((20, policy.num_uniforms)))
    assert acted.actions.shape == (20, 3, 2)
    assert set(np.unique(acted.actions)) == {-1.0, -0.5, 0.0, 0.5, 1.0}
    each = acted.logprobs.shape[1]
    assert each == {"token": 6, "action": 3, "chunk": 1}[level]
    flat = acted.inputs["actions"].reshape(20 * each, *acted.inputs["actions"].shape[2:])
    batch = replace(
        _batch(states, flat, np.ones(20 * each, np.bool_)),
        observed=torch.arange(20).repeat_interleave(each),
        decision=torch.arange(20).repeat_interleave(each),
    )
    out = policy.forward(batch, frozenset({"logprobs", "entropy"}))
    assert_near(out["logprobs"].detach(), torch.from_numpy(acted.logprobs.flatten()), rounding(16))
    assert (out["entropy"] <= log(5) * 6 / each + 1e-6).all()


def test_the_standard_deviation_at_the_start_is_that_of_the_config() -> None:
    policy = MlpPolicy(MlpSpec(initial_std=0.3), Spaces(4, KINDS[1]), seed=0)
    states = np.zeros((4000, 4), np.float32)
    uniforms = np.random.default_rng(0).random((4000, policy.num_uniforms))
    acted = policy.act({"state": states}, uniforms)
    assert acted.actions.std() == pytest.approx(0.3, rel=0.03)  # three standard errors
    with pytest.raises(ConfigError, match=r"model\.mlp\.initial_std.*discrete"):
        MlpPolicy(MlpSpec(initial_std=0.3), Spaces(4, KINDS[0]), seed=0)
    with pytest.raises(ValueError, match="remove one"):
        MlpSpec(initial_std=0.3, num_bins=5)


def test_discrete_actions_cannot_be_binned() -> None:
    with pytest.raises(ConfigError, match=r"model\.mlp\.num_bins.*discrete already"):
        MlpPolicy(MlpSpec(num_bins=5), Spaces(4, KINDS[0]), seed=0)


def test_each_observation_is_read_once_however_many_positions_it_has() -> None:
    policy, rng = _policy(KINDS[0]), np.random.default_rng(0)
    states, actions = rng.normal(size=(20, 4)).astype(np.float32), rng.integers(0, 2, 40)
    sizes: list[int] = []
    policy.module.get_submodule("body").register_forward_pre_hook(
        lambda _, inputs: sizes.append(len(inputs[0]["state"]))
    )
    repeated = _batch(np.repeat(states, 2, axis=0), actions, np.ones(40, np.bool_))
    once = replace(repeated, observations={"state": torch.from_numpy(states)}, observed=torch.arange(40) // 2)
    expected, ours = (
        policy.forward(batch, frozenset({"logprobs"}))["logprobs"].detach() for batch in (repeated, once)
    )
    assert sizes == [40, 20]
    assert_near(ours, expected, rounding(16))


@pytest.mark.parametrize("actions", KINDS, ids=lambda a: a.kind)
@pytest.mark.parametrize("size", [1, 7, 16, 40])
def test_an_action_does_not_depend_on_its_neighbours(actions: ActionSpace, size: int) -> None:
    policy = _policy(actions)
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(40, 4)).astype(np.float32)
    numbers = rng.random((40, policy.num_uniforms))
    whole = _act(policy, observations, numbers)
    parts = [_act(policy, observations[i : i + size], numbers[i : i + size]) for i in range(0, 40, size)]
    for one, many in zip(whole, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(one, np.concatenate(many))


def test_choices_are_drawn_with_their_probabilities() -> None:
    policy = _policy(KINDS[0])
    observation = np.ones((1, 4), np.float32)
    grid = (np.arange(10_000)[:, None] + 0.5) / 10_000
    drawn, logprobs = _act(policy, np.repeat(observation, 10_000, axis=0), grid)
    for action in range(3):
        expected = np.exp(logprobs[drawn == action][0])
        assert (drawn == action).mean() == pytest.approx(expected, abs=2e-4)  # the grid's step, at both ends


def test_vectors_are_drawn_with_their_mean_and_deviation() -> None:
    policy = _policy(KINDS[1])
    torch.nn.init.constant_(policy.module.get_parameter("log_std"), -0.5)
    grid = (np.arange(10_000) + 0.5) / 10_000
    rng = np.random.default_rng(0)
    numbers = np.stack([grid, rng.permutation(grid)], axis=1)
    observations = np.ones((10_000, 4), np.float32)
    drawn, _ = _act(policy, observations, numbers)
    mean, _ = _act(policy, observations[:1], None)
    np.testing.assert_allclose(
        drawn.mean(0), mean[0], atol=1e-3
    )  # a grid of 10,000 cuts the tails at 4 deviations
    np.testing.assert_allclose(drawn.std(0), np.exp(-0.5), rtol=1e-3)


def test_extreme_uniform_numbers_give_finite_actions() -> None:
    for actions in KINDS:
        policy = _policy(actions)
        for number in (0.0, np.nextafter(1.0, 0.0)):
            drawn, logprobs = _act(
                policy, np.ones((1, 4), np.float32), np.full((1, policy.num_uniforms), number)
            )
            assert np.isfinite(drawn).all()
            assert np.isfinite(logprobs).all()


def test_without_numbers_the_likeliest_action_is_taken() -> None:
    policy = _policy(KINDS[0])
    observations = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    drawn, _ = _act(policy, observations, None)
    head, body = (policy.module.get_submodule(name) for name in ("head", "body"))
    expected = head(body({"state": torch.from_numpy(observations)})).argmax(-1)
    np.testing.assert_array_equal(drawn, expected.numpy())


def test_entropies_are_those_of_the_distributions() -> None:
    observations, mask = np.ones((2, 4), np.float32), np.ones(2, bool)
    discrete = MlpPolicy(SPEC, Spaces(4, KINDS[0]), seed=0)
    torch.nn.init.zeros_(discrete.module.get_parameter("head.weight"))
    entropy = discrete.forward(_batch(observations, np.zeros(2, np.int64), mask), frozenset({"entropy"}))[
        "entropy"
    ]
    torch.testing.assert_close(entropy, torch.full((2,), log(3)))
    vector = MlpPolicy(SPEC, Spaces(4, KINDS[1]), seed=0)
    actions = np.zeros((2, 2), np.float32)
    entropy = vector.forward(_batch(observations, actions, mask), frozenset({"entropy"}))["entropy"]
    torch.testing.assert_close(entropy, torch.full((2,), 1 + log(2 * pi)))


def test_values_cover_the_final_observation() -> None:
    value = MlpValue(SPEC, Spaces(4, KINDS[0]), seed=0)
    observations = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    batch = _batch(observations, np.zeros(3, np.int64), np.array([True, True, False]))
    out = value.forward(batch, frozenset({"values"}))["values"]
    torch.testing.assert_close(out, value.module({"state": torch.from_numpy(observations)}))
    assert out[2] != 0


@pytest.mark.parametrize("detaches", ["never", "alone", "always"])
def test_a_policy_with_a_value_head_predicts_values_from_its_hidden_layers(detaches: Any) -> None:
    policy, plain = _policy(KINDS[0]), _policy(KINDS[0])
    policy.add_value_head("value_head", detaches=detaches)
    torch.nn.init.ones_(policy.module.get_parameter("value_head.weight"))
    observations = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    batch = _batch(observations, np.zeros(3, np.int64), np.array([True, True, False]))
    alone = policy.forward(batch, frozenset({"values"}))["values"]
    assert (alone != 0).all(), "the last observation has one too"
    out = policy.forward(batch, frozenset({"logprobs", "values", "value_deviation"}))
    assert torch.equal(out["values"], alone)
    assert torch.equal(out["logprobs"], plain.forward(batch, frozenset({"logprobs"}))["logprobs"])
    body = policy.module.get_parameter("body.layers.0.weight")
    alone.sum().backward()
    assert (body.grad is not None) is (detaches == "never")
    body.grad = None
    out["values"].sum().backward()
    assert policy.module.get_parameter("value_head.weight").grad is not None
    assert (body.grad is not None) is (detaches != "always")
    with pytest.raises(ModelError, match=r"critic\.head_name=body"):
        plain.add_value_head("body")


def test_the_seed_decides_the_weights_and_the_first_policy_is_close_to_uniform() -> None:
    one, same, other = (MlpPolicy(SPEC, Spaces(4, KINDS[0]), seed=s) for s in (0, 0, 1))
    weights = [torch.cat([w.flatten() for _, w in p.named_weights()]) for p in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    _, logprobs = _act(one, np.ones((1, 4), np.float32), None)
    assert logprobs[0] == pytest.approx(-log(3), abs=0.05)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("actions", KINDS, ids=lambda a: a.kind)
def test_chunks_have_the_same_logprobs_and_entropies_at_every_level(
    actions: ActionSpace, level: DecisionLevel
) -> None:
    """Two decisions on images and a state; of the second, only the first of three actions was executed."""
    spec = MlpSpec(hidden_sizes=(16,), channels=(4, 4), num_action_chunks=3)
    spaces = Spaces(2, actions, {"left": (8, 6, 3), "right": (8, 6, 1)})
    policy, rng = MlpPolicy(spec, spaces, seed=0, level=level), np.random.default_rng(0)
    torch.nn.init.normal_(policy.module.get_parameter("head.weight"))
    observations: dict[str, np.ndarray] = {
        name: rng.integers(0, 256, (3, *shape)).astype(np.uint8) for name, shape in spaces.images.items()
    }
    observations["state"] = rng.normal(size=(3, 2)).astype(np.float32)
    acted = policy.act(
        {name: values[:2] for name, values in observations.items()}, rng.random((2, policy.num_uniforms))
    )
    assert acted.actions.shape == (2, 3, *((2,) if actions.kind == "continuous" else ()))
    steps = EnvSteps(
        observations, acted.inputs, acted.logprobs, np.ones((2, 3), np.float32), np.array([3, 1], np.int32), 0
    )
    trajectory = Trajectory(Prompt("a:0", "a", (), ()), 0, env_steps=steps, reward=4.0)
    (row,) = rows_of([Group(trajectory.prompt, [trajectory])])
    width = acted.logprobs.shape[1]
    assert width == {"token": 3 * (2 if actions.kind == "continuous" else 1), "action": 3, "chunk": 1}[level]
    assert row.num_tokens == width + max(width // 3, 1) == trajectory.lengths.outputs
    batch = pack([row], torch.device("cpu"))
    out = policy.forward(batch, frozenset({"logprobs", "entropy"}))
    behavior = torch.from_numpy(row.fields["behavior_logprobs"])
    assert_near(out["logprobs"].detach(), behavior, rounding(16) * 10)
    assert row.fields["rewards"].sum() == 4
    per_action = out["entropy"][batch.decision == 0].sum() / 3
    assert_near(
        out["entropy"][batch.decision == 1].sum() / (3 if level == "chunk" else 1)
        if actions.kind == "continuous"
        else per_action,
        per_action,
        rounding(16) * 10,
    )


LEVELS: tuple[DecisionLevel, ...] = ("token", "action", "chunk")


@pytest.mark.parametrize("entropy_level", LEVELS)
@pytest.mark.parametrize("level", LEVELS)
def test_entropies_may_be_those_of_another_level_than_log_probs(
    level: DecisionLevel, entropy_level: DecisionLevel
) -> None:
    """The mean over positions is that of what entropy_level names: of 3 x 2 components, 3 actions or a
    chunk."""
    spec, spaces = MlpSpec(hidden_sizes=(16,), num_action_chunks=3, num_bins=5), Spaces(2, KINDS[1])
    observations = {"state": np.random.default_rng(0).normal(size=(2, 2)).astype(np.float32)}

    def entropies(level: DecisionLevel, entropy_level: DecisionLevel | None) -> torch.Tensor:
        policy = MlpPolicy(spec, spaces, seed=0, level=level, entropy_level=entropy_level)
        torch.nn.init.normal_(policy.module.get_parameter("head.weight"), generator=_generator())
        acted = policy.act({"state": observations["state"][:1]}, np.full((1, policy.num_uniforms), 0.5))
        steps = EnvSteps(
            observations,
            acted.inputs,
            acted.logprobs,
            np.ones((1, 3), np.float32),
            np.array([3], np.int32),
            0,
        )
        trajectory = Trajectory(Prompt("a:0", "a", (), ()), 0, env_steps=steps, reward=1.0)
        batch = pack(rows_of([Group(trajectory.prompt, [trajectory])]), torch.device("cpu"))
        return policy.forward(batch, frozenset({"entropy"}))["entropy"][batch.mask].detach()

    each = entropies("token", None)
    expected = each.mean() * {"token": 1, "action": 2, "chunk": 6}[entropy_level]
    assert_near(entropies(level, entropy_level).mean(), expected, rounding(16) * 10)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)
