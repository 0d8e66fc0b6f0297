"""Offloaded states return bit-exactly. Transfers between devices are in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from braid.config.backends import OffloadConfig
from braid.config.model import MlpSpec
from braid.config.train import OptimizerConfig, TrainConfig
from braid.models.mlp import MlpPolicy
from braid.training import offload
from braid.training.backends.fsdp import backend as fsdp
from braid.training.backends.fsdp.backend import FsdpBackend
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import supervised_loss
from braid.types import ActionSpace, Row, Spaces

CPU = torch.device("cpu")
ALL = OffloadConfig(weights=True, gradients=True, optimizer=True)


def _backend(offload: OffloadConfig = ALL, *, total_steps: int = 10, **settings: Any) -> SingleBackend:
    model = MlpPolicy(MlpSpec(hidden_sizes=(8,)), Spaces(3, ActionSpace("continuous", 2)), seed=0)
    config = TrainConfig(optimizer=OptimizerConfig(lr=0.01), offload=offload)
    return SingleBackend(model, config, total_steps=total_steps, device=CPU, **settings)


def _rows() -> list[Row]:
    rng = np.random.default_rng(0)
    states = {"state": rng.normal(size=(6, 3)).astype(np.float32)}
    inputs = {"actions": rng.normal(size=(6, 2)).astype(np.float32)}
    decision = np.arange(6, dtype=np.int32)
    return [Row(inputs, np.ones(6, bool), 0, 0, observations=states, decision=decision)]


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
    monkeypatch.setattr(
        "braid.training.backends.single.backend.move_weights", lambda *_: calls.append("move")
    )
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


class Cudart:
    """CUDA's runtime, which records what it pins."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:
        self.pinned.append((address, num_bytes))
        return 0


def test_large_pinned_memory_has_the_exact_size_and_is_reused_once_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, size = Cudart(), offload._EXACT_BYTES + 4
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(offload, "_pinned_memory", {})
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.data = offload.pinned(size).view(torch.float32)
    first = parameter.data_ptr()
    second = offload.pinned(size)
    assert cuda.pinned == [(first, size), (second.data_ptr(), size)]
    assert all(address % 4096 == 0 for address, _ in cuda.pinned)
    parameter.data = torch.zeros(1)
    assert offload.pinned(size).data_ptr() == first
    assert len(cuda.pinned) == 2


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_local_part_of_a_sharded_tensor_leaves_its_meshs_device() -> None:
    tensor = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    away = offload.moved(tensor, torch.device("meta"))
    assert isinstance(away, DTensor)
    assert away.device.type == away.to_local().device.type == "meta"
    assert away._spec == tensor._spec


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_shards_are_copied_by_moved_and_are_trained_afterwards(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        sizes.append(tensor.numel())
        return offload.moved(tensor.clone(), device)

    monkeypatch.setattr(fsdp, "moved", copied)

    def made(offload: OffloadConfig) -> FsdpBackend:
        model = MlpPolicy(MlpSpec(hidden_sizes=(8,)), Spaces(3, ActionSpace("continuous", 2)), seed=0)
        config = TrainConfig(backend=kind, optimizer=OptimizerConfig(lr=0.01), offload=offload)
        return FsdpBackend(model, config, total_steps=10, device=CPU)

    moving, still = made(ALL), made(OffloadConfig())
    (row,) = _rows()
    for _ in range(3):
        moving.to_host()
        moving.to_device()
        assert (
            moving.train([row], [1 / 6], supervised_loss(), row).loss
            == still.train([row], [1 / 6], supervised_loss(), row).loss
        )
    # both ways, three times; fsdp pads
    assert sum(sizes) >= 6 * sum(tensor.numel() for _, tensor in still.named_weights())
