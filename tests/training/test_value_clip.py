"""A value clip does not keep a critic with normalized values from returns of a large scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from braid.algorithms.recipes import RECIPES
from braid.config.model import MlpSpec
from braid.config.train import OptimizerConfig, TrainConfig
from braid.models.mlp import MlpValue
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import value_loss_of
from braid.types import ActionSpace, Row, Spaces

ROUNDS, STEPS, STATES = 10, 20, 64
MEAN, DEVIATION = 100.0, 50.0  # of returns


def _explained_variance(value_clip: float | None) -> float:
    """Of the returns, by a critic after ROUNDS rounds of STEPS steps."""
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(STATES, 2)).astype(np.float32)
    returns = (MEAN + DEVIATION * observations[:, 0]).astype(np.float32)
    states, decision = {"state": observations}, np.arange(STATES, dtype=np.int32)
    row = Row({}, np.ones(STATES, np.bool_), 0, 0, observations=states, decision=decision)
    row.fields["returns"] = returns
    train = TrainConfig(optimizer=OptimizerConfig(kind="sgd", lr=0.05))
    spaces = Spaces(2, ActionSpace("discrete", 2))
    critic = MlpValue(MlpSpec(hidden_sizes=(32,)), spaces, seed=0, normalizes=True)
    backend = SingleBackend(critic, train, total_steps=ROUNDS * STEPS, device=torch.device("cpu"))
    loss = value_loss_of(replace(RECIPES["ppo"], value_clip=value_clip))
    for _ in range(ROUNDS):
        row.fields["values"] = backend.infer([row], frozenset({"values"}))[0]["values"]
        for _ in range(STEPS):
            backend.train([row], [1 / STATES], loss)
    values = backend.infer([row], frozenset({"values"}))[0]["values"].astype(np.float64)
    return float(1.0 - (returns - values).var() / returns.var())


@pytest.mark.slow  # 400 optimizer steps
def test_returns_of_100_with_a_deviation_of_50_are_learned_as_well_with_a_value_clip() -> None:
    unclipped, clipped = _explained_variance(None), _explained_variance(0.2)
    assert unclipped > 0.9
    # In units of reward, a clip of 0.2 stops most states after the first step of a round and ends below 0.5.
    assert clipped > unclipped - 0.1
