"""Checks of runs whose models are on several ranks, and of pipelined ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checks.test_zoo import checks_of
from tests.trainer.conftest import LoadTiny, load_tiny

from braid.trainer import commands

__all__ = ["load_tiny"]

WORKERS = "cluster={runtime: ray, devices_per_node: 2, placement: {policy: 0-1, rollout: '1'}}"
AVERAGED = """
from braid.training.backends.fsdp.kind import Fsdp2

class Averaged(Fsdp2):
    def build(self, *args, **kwargs):
        backend = super().build(*args, **kwargs)
        backend._go_back = lambda loss: loss.backward()  # not times the number of ranks
        return backend
"""


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
@pytest.mark.parametrize(
    "backend", ["fsdp2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("fsdp", "deepspeed"))]
)
def test_a_run_on_two_ranks_is_silent(load_tiny: LoadTiny, backend: str) -> None:
    run = commands.train(load_tiny(WORKERS, f"train.backend={backend}", "train.micro_batch_tokens=16"))
    assert checks_of(run.run_dir)["tripped"] == []


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_gradients_that_are_averaged_over_ranks_trip_the_weights_of_the_loss(
    load_tiny: LoadTiny, tmp_path: Path
) -> None:
    """prime-rl#2562"""
    (tmp_path / "mine.py").write_text(AVERAGED)
    run = commands.train(load_tiny(WORKERS, "train.backend=mine.py:Averaged"))
    trips = {trip["check"]: trip for trip in checks_of(run.run_dir)["tripped"]}
    assert "sum to 0.5 in the gradient" in trips["loss_weights"]["evidence"]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_a_pipelined_run_is_silent(load_tiny: LoadTiny, lag: int) -> None:
    run = commands.train(
        load_tiny(f"pipeline={{max_lag: {lag}}}", "run.max_rounds=6", "train.steps_per_pass=2")
    )
    judged = checks_of(run.run_dir)
    assert judged["tripped"] == []
    assert ("sampler_logprobs" in judged["off"]) == (lag > 0)
