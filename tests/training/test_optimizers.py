"""Every optimizer takes the steps of one process on every backend."""

from __future__ import annotations

import os
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.forks import run_ranks, use_megatron_on_cpu

from braid.algorithms.recipes import RECIPES
from braid.config.schema import RunConfig
from braid.config.train import OptimizerConfig
from braid.models.roles import make_critic
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import value_loss_of
from braid.types import Row

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
KINDS = typing.get_args(OptimizerConfig.model_fields["kind"].annotation)
BACKENDS = ("fsdp", "fsdp2", "deepspeed", "megatron")
RATE = 0.01


def _step(rank: int, folder: Path, backend: str) -> None:
    if backend == "megatron":
        use_megatron_on_cpu()
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for kind in KINDS:
        for dtype in ("fp32", "bf16"):
            _compare(rank, kind, dtype, backend, max_grad_norm=1.0)
        _compare(rank, kind, "fp32", backend, max_grad_norm=None)
    dist.destroy_process_group()


def _compare(rank: int, kind: str, dtype: str, backend: str, *, max_grad_norm: float | None) -> None:
    build = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "head_dim": 16}
    optimizer = {"kind": kind, "lr": RATE, "value_lr": 2 * RATE, "weight_decay": 0.1, "eps": 1e-4}
    train = {"backend": backend, "optimizer": optimizer, "max_grad_norm": max_grad_norm}
    config = RunConfig.model_validate({"model": {"build": build, "dtype": dtype}, "train": train})
    single = SingleBackend(make_critic(config, CPU), config.train, total_steps=2, device=CPU)
    sharded = config.train.backend.build(make_critic(config, CPU), config.train, total_steps=2, device=CPU)
    rows = []
    for i in range(4):
        ids = np.random.default_rng(i).integers(3, 60, 9)
        mask = np.arange(9) > 2
        returns = {name: np.full(9, 1.0 + i, np.float32) for name in ("returns", "values")}
        rows.append(Row({"input_ids": ids}, mask, i, i, fields=returns))
    start = {name: tensor.clone() for name, tensor in single.state()["weights"].items()}
    loss = value_loss_of(RECIPES["ppo"])
    for _ in range(2):
        assert single.train(rows, [1 / 24] * 4, loss).grad_norm > 1, "no gradient to clip"
        rank_rows = rows[2 * rank : 2 * rank + 2] if sharded.data_place()[1] == 2 else rows
        sharded.train(rank_rows, [1 / 24] * len(rank_rows), loss, rows[0])
    actual, expected = sharded.state()["weights"], single.state()["weights"]
    for name, tensor in expected.items() if rank == 0 else ():
        moved = (tensor - start[name]).norm()
        assert moved > 0, name
        # bf16: gradients are rounded before they are reduced, and AdamW divides small ones by their own size
        allowed = moved * (1e-3 if dtype == "fp32" else 0.1)
        assert (actual[name] - tensor).norm() <= allowed, (kind, dtype, name)


@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("fsdp", "megatron"))) for name in BACKENDS],
)
def test_every_optimizer_takes_the_steps_of_one_process(backend: str, tmp_path: Path) -> None:
    run_ranks(_step, tmp_path, backend)
