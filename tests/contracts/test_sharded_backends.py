"""Every way to spread training over ranks takes the steps that one process takes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from braid.algorithms.aggregate import row_weights
from braid.algorithms.recipes import RECIPES
from braid.config.schema import RunConfig
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.runtime.ray import RayGroup, connect, disconnect
from braid.training.backend import StepReport
from braid.training.backends.single import SingleBackend
from braid.training.group import GroupBackend
from braid.training.losses import policy_loss
from braid.training.worker import make_backend
from braid.types import Row

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

NUM_STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2, gradients travel in every pass": {
        "backend": "fsdp2",
        "fsdp": {"sync_last_micro_batch_only": False},
    },
    "fsdp2, replicas of one": {"backend": "fsdp2", "fsdp": {"size": 1}},
    "fsdp2 in host memory": {"backend": "fsdp2", "fsdp": {"cpu_offload": True}},
    "fsdp": {"backend": "fsdp"},
    "fsdp, gradients and optimizer": {"backend": "fsdp", "fsdp": {"sharding": "grad_op"}},
    "deepspeed": {"backend": "deepspeed"},
    "fsdp2, Ulysses": {"backend": "fsdp2", "sequence_parallel": 2},
    "fsdp, nothing sharded": {"backend": "fsdp", "fsdp": {"sharding": "none"}},
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    connect(_config().cluster, num_processes=2)
    yield
    disconnect()


def _config(**train: Any) -> RunConfig:
    build = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "head_dim": 16}
    train = {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 64, **train}
    return RunConfig.model_validate({"model": {"build": build}, "train": train, "run": {"device": "cpu"}})


def _model() -> CausalLM:
    return load_policy(_config().model, temperature=1.0, seed=0, device=torch.device("cpu"))


def _single() -> SingleBackend:
    return SingleBackend(_model(), _config().train, total_steps=9, device=torch.device("cpu"))


def _group(layout: str) -> GroupBackend:
    config = _config(**LAYOUTS[layout])
    workers = RayGroup(
        "policy", partial(make_backend, role="policy", config=config, total_steps=9), 2, config.cluster
    )
    return GroupBackend(workers)


def _rows() -> list[Row]:
    """Ragged rows, so that ranks get unlike numbers of micro-batches."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for group in range(5):
        prompt = rng.integers(0, 90, rng.integers(5, 9))
        for _ in range(3):
            ids = np.concatenate([prompt, rng.integers(0, 90, rng.integers(3, 40))])
            mask = np.arange(len(ids)) >= len(prompt)
            fields = {"advantages": rng.normal(size=len(ids)).astype(np.float32) * mask}
            rows.append(Row({"input_ids": ids}, mask, group, len(rows), fields=fields))
    return rows


def _train(backend: GroupBackend | SingleBackend, num_steps: int = NUM_STEPS) -> list[StepReport]:
    rows = _rows()
    weights = row_weights(
        [row.num_tokens for row in rows], [row.group for row in rows], mode="token_mean", constant=None
    )
    loss = policy_loss(RECIPES["grpo"])
    return [backend.train(rows, weights, loss) for _ in range(num_steps)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_takes_the_steps_of_one_process(layout: str) -> None:
    # The same sums in another order: float32 rounding, 1e-6 of numbers of size one.
    single, group = _single(), _group(layout)
    try:
        rows, outputs = _rows(), frozenset({"logprobs", "entropy"})
        for mine, other in zip(group.infer(rows, outputs), single.infer(rows, outputs), strict=True):
            for name in outputs:
                np.testing.assert_allclose(mine[name], other[name], atol=2e-6)
        for mine, other in zip(_train(group), _train(single), strict=True):
            assert mine.loss == pytest.approx(other.loss, abs=1e-6)
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
            assert (mine.lr, mine.num_tokens, mine.is_skipped) == (
                other.lr,
                other.num_tokens,
                other.is_skipped,
            )
            assert mine.metrics.keys() == other.metrics.keys()
            for name, (total, count) in mine.metrics.items():
                assert count == other.metrics[name][1]
                assert total == pytest.approx(other.metrics[name][0], rel=1e-5, abs=1e-4)
        _assert_close(group.full_weights(), dict(single.named_weights()))
    finally:
        group.group.close()


def _assert_close(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Within a hundredth of one AdamW step, which divides small gradients, and their roundings, by their own size."""
    assert list(mine) == list(other)
    for name, tensor in other.items():
        torch.testing.assert_close(
            mine[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp"])
def test_a_checkpoint_of_one_layout_goes_on_in_another(layout: str) -> None:
    unbroken = _single()
    _train(unbroken, 4)
    group, alone = _group(layout), _single()
    try:
        group.state()  # a checkpoint before the first step changes nothing
        _train(group, 2)
        alone.load(copy.deepcopy(group.state()))
        _train(alone, 1)
        group.load(copy.deepcopy(alone.state()))
        _train(group, 1)
        _assert_close(group.full_weights(), dict(unbroken.named_weights()))
    finally:
        group.group.close()
