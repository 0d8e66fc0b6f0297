"""Runs on Ray's workers with three devices, of which each process sees those that its placement gives it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.trainer.test_sharded_runs import GREEDY, MODES, Settings, _lines, _run

import braid.trainer.weight_sync
from braid.cluster.ray import connect, disconnect
from braid.config.cluster import ClusterConfig

RUNS: dict[str, tuple[str, Settings]] = {
    "collocated on one device": (
        "cuda_ipc",
        {**GREEDY, "cluster.runtime": "ray", "cluster.placement": {"policy,reference,rollout": "0"}},
    ),
    "collocated, fsdp2": ("shared_memory", {**MODES["collocated"][0], **MODES["collocated"][1]}),
    "disaggregated, fsdp": (
        "nccl",
        {
            **GREEDY,
            "train.backend": "fsdp",
            "cluster.placement": {"policy": "0-1", "reference": "0", "rollout": "2"},
        },
    ),
    "hybrid, every role": (
        "nccl",
        {**MODES["hybrid, every role"][0], **MODES["hybrid, every role"][1]},
    ),
}
"""Transport of the weights and settings. NCCL has one rank per device, so weights pass through host memory
where only some engines share that of the policy's first rank."""
_EVERY_TIME = ("disaggregated, fsdp",)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all runs."""
    assert torch.cuda.device_count() == 3
    connect(ClusterConfig(), num_processes=8)
    yield
    disconnect()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in _EVERY_TIME)) for name in RUNS]
)
def test_engines_sample_with_the_weights_that_ranks_have_trained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, settings = RUNS[name]
    chosen, choose = set[str](), braid.trainer.weight_sync.choose_transport
    monkeypatch.setattr(
        braid.trainer.weight_sync,
        "choose_transport",
        lambda *args: chosen.add(way := choose(*args)) or way,
    )
    settings = {**settings, "run.device": "cuda", "eval.every_rounds": 0, "sft": None}
    lines = _lines(_run(tmp_path, "run", settings, rounds=2))
    assert chosen == {transport}
    kls = [line["policy/logprob_mismatch_kl"] for line in lines if "policy/logprob_mismatch_kl" in line]
    assert len(kls) == 2
    # both compute in bf16; an update of the first round's size would be seen
    assert max(kls) < 1e-6
