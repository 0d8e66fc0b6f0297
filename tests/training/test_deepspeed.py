"""DeepSpeed features not covered by tests/contracts: precisions, adapters, a model that is not trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.on_ranks import OnRanks

from braid.algorithms.recipes import RECIPES
from braid.cluster.ray import RayGroup, connect, disconnect
from braid.config.schema import RunConfig
from braid.models.roles import make_policy
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss
from braid.training.worker import Rank
from braid.types import Row

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]

OUTPUTS = frozenset({"logprobs"})
LOSS = policy_loss(RECIPES["grpo"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[RayGroup]:
    config = _config()
    connect(config.cluster, num_processes=2)
    group = RayGroup("policy", 2, config.cluster).make(partial(Rank, config=config))
    yield group
    group.close()
    disconnect()


def _config(train: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    build = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "head_dim": 16}
    train = {"optimizer": {"lr": 1e-3, "eps": 1e-5}, "backend": "deepspeed", **(train or {})}
    return RunConfig.model_validate(
        {"model": {"build": build, **model}, "train": train, "run": {"device": "cpu"}}
    )


def _group(ranks: RayGroup, config: RunConfig, total_steps: int = 9) -> OnRanks:
    return OnRanks(ranks, "policy" if total_steps else "reference", config, total_steps)


def _single(config: RunConfig) -> SingleBackend:
    device = torch.device("cpu")
    return SingleBackend(make_policy(config, device), config.train, total_steps=9, device=device)


def _rows() -> list[Row]:
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for group in range(4):
        ids = rng.integers(0, 90, rng.integers(8, 20))
        mask = np.arange(len(ids)) >= 4
        fields = {"advantages": rng.normal(size=len(ids)).astype(np.float32) * mask}
        rows.append(Row({"input_ids": ids}, mask, group, group, fields=fields))
    return rows


def _train(backend: OnRanks | SingleBackend) -> float:
    return backend.train(_rows(), [0.02] * 4, LOSS).grad_norm


def _assert_infers_alike(group: OnRanks, single: SingleBackend, atol: float) -> None:
    rows = _rows()
    for mine, other in zip(group.infer(rows, OUTPUTS), single.infer(rows, OUTPUTS), strict=True):
        np.testing.assert_allclose(mine["logprobs"], other["logprobs"], atol=atol)


def test_matrix_products_use_the_autocast_type(ranks: RayGroup) -> None:
    config = _config({"autocast": "bf16"})
    group, single, exact = _group(ranks, config), _single(config), _single(_config())
    try:
        # bf16 keeps 8 bits: its rounding shows between it and float32, and not between one process and two
        _assert_infers_alike(group, single, atol=1e-5)
        with pytest.raises(AssertionError, match="Not equal"):
            _assert_infers_alike(group, exact, atol=1e-5)
        assert _train(group) == pytest.approx(_train(single), rel=1e-2)
    finally:
        group.close()


def test_weights_of_half_precision_have_a_float32_copy_that_is_their_state(ranks: RayGroup) -> None:
    config = _config(dtype="bf16")
    group, single = _group(ranks, config), _single(config)
    try:
        _assert_infers_alike(group, single, atol=0.05)
        assert _train(group) == pytest.approx(_train(single), rel=0.05)
        state, used = copy.deepcopy(group.state()), group.full_weights()
        for name, exact in state["weights"].items():
            assert (exact.dtype, used[name].dtype) == (torch.float32, torch.bfloat16)
            torch.testing.assert_close(exact.bfloat16(), used[name], rtol=0, atol=0)
        assert any((state["weights"][n].bfloat16().float() != state["weights"][n]).any() for n in used)
        _train(group)
        unbroken = group.state()["weights"]
        group.load(state)
        _train(group)
        for name, exact in group.state()["weights"].items():
            torch.testing.assert_close(exact, unbroken[name], rtol=0, atol=0)
    finally:
        group.close()


def test_adapters_train_with_frozen_weights(ranks: RayGroup) -> None:
    config = _config(lora={"rank": 4, "targets": ["q_proj", "down_proj"]})
    group, single = _group(ranks, config), _single(config)
    try:
        for _ in range(2):
            # the same sums in another order
            assert _train(group) == pytest.approx(_train(single), rel=1e-4)
        mine, other = group.full_weights(), single.full_weights()
        assert mine.keys() == other.keys()
        for name, tensor in other.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-5, atol=1e-5)
    finally:
        group.close()


def test_a_model_that_is_never_trained_infers_and_takes_weights(ranks: RayGroup) -> None:
    group, single = _group(ranks, _config(), total_steps=0), _single(_config())
    try:
        _assert_infers_alike(group, single, atol=2e-6)
        _train(single)
        group.to_host()
        group.load_weights(single.full_weights())
        group.to_device()
        _assert_infers_alike(group, single, atol=2e-6)
        assert not group.state()["optimizer"]
    finally:
        group.close()
