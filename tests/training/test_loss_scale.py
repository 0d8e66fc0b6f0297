"""The loss scale: when it is halved and doubled, and what a scaled step reports."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from braid.config.backends import GradScalerConfig
from braid.config.model import MlpSpec
from braid.config.train import OptimizerConfig, TrainConfig
from braid.errors import TrainingError
from braid.models.batch import PackedBatch
from braid.models.mlp import MlpPolicy
from braid.training.backend import Diagnostics, Loss, StepReport
from braid.training.backends.single.backend import SingleBackend
from braid.training.loss_scale import LossScale
from braid.types import ActionSpace, Row, Spaces

CPU = torch.device("cpu")


def _backend(**train: Any) -> SingleBackend:
    model = MlpPolicy(MlpSpec(hidden_sizes=(8,)), Spaces(3, ActionSpace("discrete", 4)), seed=0)
    config = TrainConfig(**{"optimizer": OptimizerConfig(lr=0.01), "autocast": "fp16", **train})
    return SingleBackend(model, config, total_steps=10, device=CPU)


def _rows() -> list[Row]:
    rng = np.random.default_rng(0)
    states = {"state": rng.normal(size=(6, 3)).astype(np.float32)}
    inputs, decision = {"actions": rng.integers(0, 4, 6)}, np.arange(6, dtype=np.int32)
    return [Row(inputs, np.ones(6, bool), 0, 0, observations=states, decision=decision)]


def _loss_of(factor: float) -> Loss:
    def compute(outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
        assert batch.weights is not None
        return -(outputs["logprobs"] * batch.weights).sum() * factor, Diagnostics({})

    return Loss(frozenset({"logprobs"}), compute)


def _step(backend: SingleBackend, factor: float = 1.0) -> StepReport:
    return backend.train(_rows(), [1 / 6], _loss_of(factor))


def _scaled(init_scale: float = 1024.0, growth_interval: int = 2000) -> GradScalerConfig:
    return GradScalerConfig(init_scale=init_scale, growth_interval=growth_interval)


def test_an_overflow_halves_the_scale_and_finite_steps_double_it() -> None:
    scale = LossScale(_scaled(8.0, growth_interval=2))
    scales = []
    for is_overflow in (True, False, False, False, True, False, False):
        scale.update(is_overflow=is_overflow)
        scales.append(scale.value)
    assert scales == [4, 4, 8, 8, 4, 4, 8]


def test_the_scale_never_falls_below_one() -> None:
    scale = LossScale(_scaled(2.0))
    for _ in range(3):
        scale.update(is_overflow=True)
    assert scale.value == 1.0
    assert not scale.can_shrink


def test_a_scale_that_is_a_power_of_two_changes_no_bit_of_a_step() -> None:
    # where nothing underflows: fp16 numbers are multiplied by a power of two exactly
    plain, scaled = _backend(), _backend(grad_scaler=_scaled(16.0))
    one, other = _step(plain), _step(scaled)
    assert (other.loss, other.loss_scale, other.is_skipped) == (one.loss, 16.0, False)
    assert other.grad_norm == pytest.approx(
        one.grad_norm, rel=1e-3
    )  # subnormal fp16 gradients keep more bits
    assert one.loss_scale is None


def test_small_gradients_survive_only_with_a_scale() -> None:
    # 1e-6 / 6 for a token is below fp16's least number times the activations' size
    vanished = _step(_backend(), 1e-7).grad_norm
    kept = _step(_backend(grad_scaler=_scaled(2.0**20)), 1e-7).grad_norm
    assert kept == pytest.approx(1e-7 * _step(_backend(autocast="none")).grad_norm, rel=2e-2)  # fp16 products
    assert vanished < 0.5 * kept


def test_an_overflow_leaves_weights_as_they_are_and_does_not_count_as_skipped() -> None:
    backend = _backend(grad_scaler=_scaled(2.0**30), max_skipped_steps=1)
    before = {name: tensor.detach().clone() for name, tensor in backend.named_weights()}
    report = _step(backend)
    assert report.is_overflow
    assert report.loss_scale == 2.0**30
    assert math.isfinite(report.loss)
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.named_weights())
    assert backend.state()["skipped_in_row"] == 0
    assert backend.state()["loss_scale"]["value"] == 2.0**29


def test_steps_overflow_until_the_scale_fits() -> None:
    backend = _backend(grad_scaler=_scaled(2.0**24), max_skipped_steps=1)
    reports = [_step(backend) for _ in range(20)]
    first = [report.is_overflow for report in reports].index(False)
    assert first > 0
    assert not any(report.is_overflow or report.is_skipped for report in reports[first:])


def test_a_loss_that_is_not_finite_counts_as_skipped_whatever_the_scale() -> None:
    backend = _backend(grad_scaler=_scaled(), max_skipped_steps=2)
    report = _step(backend, math.nan)
    assert report.is_skipped
    assert not report.is_overflow
    assert backend.state()["loss_scale"]["value"] == 1024.0
    with pytest.raises(TrainingError, match="not finite"):
        _step(backend, math.inf)


def test_the_scale_is_restored_from_a_checkpoint() -> None:
    settings = {"grad_scaler": _scaled(2.0**22, growth_interval=3)}
    backend, resumed = _backend(**settings), _backend(**settings)
    for _ in range(9):
        _step(backend)
    resumed.load(deepcopy(backend.state()))
    assert [_step(resumed) for _ in range(4)] == [_step(backend) for _ in range(4)]
    assert resumed.state()["loss_scale"] == backend.state()["loss_scale"]


def test_without_fp16_there_is_nothing_to_scale() -> None:
    assert _step(_backend(autocast="none", grad_scaler=_scaled())).loss_scale is None


def test_fp16_products_keep_weights_and_log_probs_in_fp32() -> None:
    exact, rounded = _backend(autocast="none"), _backend()
    outputs = frozenset({"logprobs"})
    (one,), (other,) = (backend.infer(_rows(), outputs) for backend in (exact, rounded))
    np.testing.assert_allclose(one["logprobs"], other["logprobs"], rtol=0, atol=5e-3)  # 11 bits of mantissa
    assert not np.array_equal(one["logprobs"], other["logprobs"])
    assert all(tensor.dtype == torch.float32 for _, tensor in rounded.named_weights())
