"""Offloaded states return bit-exactly. Transfers between devices are in tests/gpu."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from braid.config.backends import OffloadConfig
from braid.config.model import MlpSpec
from braid.config.train import OptimizerConfig, TrainConfig
from braid.models.mlp import MlpPolicy
from braid.training.backends.single import SingleBackend
from braid.training.losses import supervised_loss
from braid.types import ActionSpace, Row

CPU = torch.device("cpu")
ALL = OffloadConfig(weights=True, gradients=True, optimizer=True)


def _backend(offload: OffloadConfig = ALL, *, total_steps: int = 10, **settings: Any) -> SingleBackend:
    model = MlpPolicy(MlpSpec(hidden_sizes=(8,)), 3, ActionSpace("continuous", 2), seed=0)
    config = TrainConfig(optimizer=OptimizerConfig(lr=0.01), offload=offload)
    return SingleBackend(model, config, total_steps=total_steps, device=CPU, **settings)


def _rows() -> list[Row]:
    rng = np.random.default_rng(0)
    inputs = {
        "observations": rng.normal(size=(6, 3)).astype(np.float32),
        "actions": rng.normal(size=(6, 2)).astype(np.float32),
    }
    return [Row(inputs, np.ones(6, bool), group=0, trajectory=0)]


def _step(backend: SingleBackend) -> float:
    return backend.train(_rows(), [1 / 6], supervised_loss()).loss


def test_a_round_trip_between_steps_changes_no_bit() -> None:
    moved, still = _backend(), _backend(OffloadConfig())
    for _ in range(3):
        moved.to_host()
        moved.to_device()
        assert _step(moved) == _step(still)
    for (name, one), (_, other) in zip(moved.named_weights(), still.named_weights(), strict=True):
        assert torch.equal(one, other), name


def test_a_round_trip_keeps_the_parameters_that_the_optimizer_has() -> None:
    backend = _backend()
    before = [id(tensor) for _, tensor in backend.named_weights()]
    backend.to_host()
    backend.to_device()
    assert [id(tensor) for _, tensor in backend.named_weights()] == before


def test_a_checkpoint_can_be_saved_and_loaded_while_weights_are_offloaded() -> None:
    unbroken, resumed = _backend(), _backend()
    _step(unbroken)
    unbroken.to_host()
    state = deepcopy(unbroken.state())
    unbroken.to_device()
    resumed.to_host()
    resumed.load(state)
    resumed.to_device()
    assert [_step(resumed) for _ in range(2)] == [_step(unbroken) for _ in range(2)]


def test_allocator_memory_is_released_after_offloading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("braid.training.backends.single.move_weights", lambda *_: calls.append("move"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("give back"))
    _backend().to_host()
    assert calls == ["move", "give back"]


def test_no_gradient_outlives_a_step() -> None:
    backend = _backend()
    _step(backend)
    assert all(tensor.grad is None for _, tensor in backend.named_weights())


def test_held_bytes_are_those_of_the_tensors() -> None:
    backend = _backend()
    parameters = 3 * 8 + 8 + 8 * 2 + 2 + 2
    assert backend.held_bytes().weights == backend.held_bytes().gradients == 4 * parameters
    assert backend.held_bytes().optimizer == 0
    _step(backend)
    # two moments of every number, and a step count for each of the five tensors
    assert backend.held_bytes().optimizer == 2 * 4 * parameters + 5 * 4


@pytest.mark.parametrize("total_steps", [0, 10])
def test_a_model_that_is_never_trained_holds_weights_alone(total_steps: int) -> None:
    held = _backend(total_steps=total_steps).held_bytes()
    assert (held.gradients > 0) == (total_steps > 0)
