"""The native engine of a run computes as its training does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from braid.config.load import load_config
from braid.models.roles import make_policy
from braid.trainer.collectors import native_engine

BASE = [
    "model.build={num_layers: 1}",
    "run.max_rounds=1",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "reward.parts=[{kind: exact}]",
]
FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("overrides", "linear", "norm"),
    [
        ([], FLOAT, FLOAT),
        (["train.autocast=bf16"], HALF, FLOAT),
        (["train.autocast=bf16", "rollout.native.dtype=fp32"], FLOAT, FLOAT),
        (["train.backend=fsdp2", "train.autocast=bf16"], HALF, HALF),
        (["train.backend=fsdp2", "train.fsdp.param_dtype=bf16"], HALF, HALF),
    ],
)
def test_the_engine_computes_as_training_does(
    overrides: list[str], linear: torch.dtype, norm: torch.dtype
) -> None:
    config = load_config(None, [*BASE, *overrides]).config
    lm = make_policy(config, torch.device("cpu"))
    engine = native_engine(config, cast("Any", SimpleNamespace(decode=str)), lm)
    weights = dict(engine.named_parameters())
    assert weights["model.layers.0.mlp.down_proj.weight"].dtype == linear
    assert weights["model.norm.weight"].dtype == norm
    assert engine.shares_weights == (linear == FLOAT)
