"""Soft actor-critic: log-probs, targets and updates against formulas written out, and its state."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.test_replay import trajectory
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from braid.config.model import MlpSpec
from braid.config.sac import SacConfig, TemperatureConfig
from braid.errors import CheckpointError, ConfigError
from braid.models.soft_actor_critic import QEnsemble, SquashedGaussian, squashed
from braid.training.replay import Transitions
from braid.training.soft_actor_critic import SoftActorCritic, Temperature, td_target
from braid.types import ActionSpace, Spaces, Status

SPEC = MlpSpec(hidden_sizes=(16, 8), activation="relu")
SPACES = Spaces(1, ActionSpace("continuous", 1))
BATCH, CPU = 12, torch.device("cpu")


def config(**settings: Any) -> SacConfig:
    small = {"batch_size": BATCH, "min_transitions": 0, "random_decisions": 0, "capacity": 100}
    return SacConfig.model_validate(small | settings)


def learner(sac: SacConfig, spec: MlpSpec = SPEC) -> tuple[SoftActorCritic, SquashedGaussian, QEnsemble]:
    policy, critics = SquashedGaussian(spec, SPACES, seed=0), QEnsemble(spec, SPACES, sac, seed=1)
    return SoftActorCritic(sac, policy, critics, (0, 6)), policy, critics


def test_log_probs_are_those_of_torchs_transformed_normal() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = torch.randn(3, 50, 4, generator=generator, dtype=torch.float64)
    actions, logprobs = squashed(mean, log_std, noise)
    gaussian = Independent(Normal(mean, log_std.exp()), 1)
    exact = TransformedDistribution(gaussian, [TanhTransform()])
    inner = mean + log_std.exp() * noise
    assert torch.equal(actions, inner.tanh())
    inside = inner.abs().amax(-1) < 3  # beyond, atanh of an action loses digits
    assert inside.sum() > 20
    assert torch.allclose(logprobs[inside], exact.log_prob(actions)[inside], atol=1e-6)


def test_log_probs_far_out_are_finite_and_have_gradients() -> None:
    mean = torch.tensor([[50.0], [-50.0]], requires_grad=True)
    _, logprobs = squashed(mean, torch.zeros(2, 1), torch.zeros(2, 1))
    logprobs.sum().backward()
    assert mean.grad is not None
    # log N(0) - 2 (log 2 - |u|): the slope of tanh is 4 exp(-2 |u|) far out
    assert logprobs.tolist() == pytest.approx([-0.5 * math.log(2 * math.pi) - 2 * math.log(2) + 100] * 2)
    assert mean.grad.flatten().tolist() == pytest.approx([2.0, -2.0])


def test_actions_depend_on_no_other_row_and_are_chunks() -> None:
    spec = SPEC.model_copy(update={"num_action_chunks": 3})
    policy = SquashedGaussian(spec, Spaces(1, ActionSpace("continuous", 2)), seed=0)
    states, uniforms = (
        np.random.default_rng(0).random((5, 1), np.float32),
        np.random.default_rng(1).random((5, 6)),
    )
    together = policy.act({"state": states}, uniforms)
    assert together.actions.shape == (5, 3, 2)
    assert together.inputs["actions"].shape == (5, 1, 3, 2)
    alone = policy.act({"state": states[3:4]}, uniforms[3:4])
    assert (alone.actions == together.actions[3:4]).all()
    assert (np.abs(together.actions) < 1).all()
    greedy = policy.act({"state": states}, None).actions
    assert (greedy == policy.act({"state": states}, np.full((5, 6), 0.5)).actions).all()


def test_random_actions_are_uniform_with_their_density() -> None:
    policy = SquashedGaussian(SPEC, SPACES, seed=0)
    policy.set_uniform(True)
    acted = policy.act({"state": np.zeros((3, 1), np.float32)}, np.array([[0.0], [0.25], [0.75]]))
    assert acted.actions.ravel().tolist() == [-1.0, -0.5, 0.5]
    assert acted.logprobs.ravel().tolist() == pytest.approx([math.log(1 / 2)] * 3)


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match="discrete"):
        SquashedGaussian(SPEC, Spaces(1, ActionSpace("discrete", 2)), seed=0)


REWARDS, VALUES = torch.tensor([1.0, 2.0]), torch.tensor([[10.0, 20.0], [8.0, 26.0]])
ENDS, LOGPROBS, ALPHA = torch.tensor([False, True]), torch.tensor([-3.0, 4.0]), torch.tensor(0.5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1 + 0.9 * (8 + 0.5 * 3), 2.0]),
        ({"target_reduce": "mean"}, [1 + 0.9 * (9 + 0.5 * 3), 2.0]),
        ({"backup_entropy": False}, [1 + 0.9 * 8, 2.0]),
        ({"bootstrap": "always"}, [1 + 0.9 * (8 + 0.5 * 3), 2 + 0.9 * (20 - 0.5 * 4)]),
    ],
)
def test_targets_are_the_soft_bellman_backup(settings: dict[str, Any], expected: list[float]) -> None:
    sac = config(gamma=0.9, **settings)
    target = td_target(REWARDS, ENDS, VALUES, LOGPROBS, ALPHA, sac)
    assert target.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("norm", ["none", "layer"])
def test_critics_of_an_ensemble_are_separate_perceptrons(norm: str) -> None:
    sac = config(num_critics=3, critic_norm=norm)
    critics = QEnsemble(SPEC, SPACES, sac, seed=0)
    states, actions = torch.randn(5, 1), torch.randn(5, 1)
    together = critics({"state": states}, actions)
    assert together.shape == (3, 5)
    for n in range(3):
        hidden = torch.cat([states, actions], 1)
        for i in range(3):
            hidden = hidden @ critics.weights[i][n] + critics.biases[i][n]
            if i < 2:
                if norm == "layer":
                    spread = hidden.var(1, keepdim=True, correction=0)
                    hidden = (hidden - hidden.mean(1, keepdim=True)) / (spread + 1e-5).sqrt()
                hidden = hidden.relu()
        assert torch.allclose(hidden[:, 0], together[n], atol=1e-5)
    assert not torch.allclose(together[0], together[1])


def test_the_temperature_falls_while_the_entropy_is_above_its_target() -> None:
    for kind in ("exp", "softplus"):
        falling, rising = (Temperature(TemperatureConfig(kind=kind, initial=0.3), 2, CPU) for _ in range(2))
        assert falling.alpha.item() == pytest.approx(0.3, rel=1e-5)
        falling.step(torch.tensor(-1.9))  # the target is minus 2 components
        rising.step(torch.tensor(-2.1))
        assert falling.alpha.item() < 0.3 < rising.alpha.item()
    fixed = Temperature(TemperatureConfig(kind="fixed", initial=0.3), 2, CPU)
    fixed.step(torch.tensor(5.0))
    assert fixed.alpha.item() == pytest.approx(0.3)


def test_an_update_moves_the_targets_by_tau_and_counts_by_the_ratio() -> None:
    sac, policy, critics = learner(config(tau=0.25, updates_per_decision=0.5, min_transitions=4))
    before = copy.deepcopy(critics).state_dict()
    num_updates, metrics = sac.learn([trajectory(0, 3, Status.FINISHED)])
    assert num_updates == 0, "three decisions are fewer than min_transitions"
    assert "critic/loss" not in metrics
    num_updates, _ = sac.learn([trajectory(10, 3, Status.FINISHED)])
    assert num_updates == 1, "half of the two decisions beyond"
    targets = sac.state()["targets"]
    for name, weight in critics.state_dict().items():
        assert torch.allclose(targets[name], 0.75 * before[name] + 0.25 * weight, atol=1e-6)
        assert not torch.equal(weight, before[name]) or "bias" in name
    assert not policy.module.get_buffer("is_uniform")


def test_policy_and_temperature_wait_for_their_turn_and_for_enough_decisions() -> None:
    def changed(**settings: Any) -> bool:
        sac, policy, _ = learner(config(updates_per_round=3, **settings))
        before = copy.deepcopy(policy.module.state_dict())
        sac.learn([trajectory(0, 5, Status.FINISHED)])
        return not torch.equal(policy.module.state_dict()["head.weight"], before["head.weight"])

    assert changed()
    assert not changed(actor_every_updates=4)
    assert not changed(min_transitions_actor=6)


def test_batches_have_their_share_of_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    sac = config(updates_per_round=5, demonstration_fraction=0.25)
    policy, critics = SquashedGaussian(SPEC, SPACES, seed=0), QEnsemble(SPEC, SPACES, sac, seed=1)
    demonstrated = [Transitions.of(trajectory(100, 3, Status.FINISHED))]
    learns = SoftActorCritic(sac, policy, critics, (0, 6), demonstrated)
    read: list[list[float]] = []

    def note(rewards: torch.Tensor, *others: Any) -> torch.Tensor:
        read.append(rewards.tolist())
        return td_target(rewards, *others)

    monkeypatch.setattr("braid.training.soft_actor_critic.td_target", note)
    learns.learn([trajectory(0, 5, Status.FINISHED)])
    assert [sum(reward >= 100 for reward in batch) for batch in read] == [BATCH // 4] * 5
    assert {len(batch) for batch in read} == {BATCH}


def test_a_restored_learner_continues_to_the_bit() -> None:
    settings = config(num_critics=4, num_target_critics=2, critic_norm="layer", random_decisions=8)
    episodes = [trajectory(10 * i, 5, Status.TRUNCATED) for i in range(4)]
    unbroken, policy, critics = learner(settings)
    unbroken.learn(episodes[:2])
    state, weights = copy.deepcopy(unbroken.state()), copy.deepcopy(policy.module.state_dict())
    unbroken.learn(episodes[2:])
    resumed, other_policy, other_critics = learner(settings)
    other_policy.module.load_state_dict(weights)
    resumed.load(state)
    resumed.learn(episodes[2:])
    for one, other in ((policy.module, other_policy.module), (critics, other_critics)):
        for name, weight in one.state_dict().items():
            assert torch.equal(weight, other.state_dict()[name]), name
    assert resumed.state()["num_updates"] == unbroken.state()["num_updates"] == 20


def test_a_checkpoint_of_other_critics_is_refused() -> None:
    state = learner(config(num_critics=3))[0].state()
    with pytest.raises(CheckpointError, match="critics do not fit"):
        learner(config())[0].load(state)


def test_images_train_the_encoders_of_policy_and_critics() -> None:
    spec = MlpSpec(hidden_sizes=(8,), channels=(4, 4))
    spaces = Spaces(1, ActionSpace("continuous", 1), {"image": (8, 8, 3)})
    sac = config(updates_per_round=2)
    policy, critics = SquashedGaussian(spec, spaces, seed=0), QEnsemble(spec, spaces, sac, seed=1)
    before = [copy.deepcopy(module.state_dict()) for module in (policy.module, critics)]
    episode = trajectory(0, 5, Status.FINISHED)
    assert episode.env_steps is not None
    pictures = np.random.default_rng(0).integers(0, 255, (6, 8, 8, 3), np.uint8)
    episode.env_steps.observations["image"] = pictures
    SoftActorCritic(sac, policy, critics, (0, 6)).learn([episode])
    after = [module.state_dict() for module in (policy.module, critics)]
    for one, other in zip(before, after, strict=True):
        convolutions = [name for name in one if "convolutions" in name and name.endswith("weight")]
        assert len(convolutions) == 2
        assert not any(torch.equal(one[name], other[name]) for name in convolutions)
