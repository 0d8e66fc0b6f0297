"""Whole runs that sample with an engine beside the process that trains."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from braid.controller import commands

from .conftest import LoadTiny


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("vllm")
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")
def test_a_run_samples_with_vllm_in_a_process_of_its_own_and_learns_from_it(load_tiny: LoadTiny) -> None:
    outcome = commands.train(
        load_tiny(
            "rollout.engine=vllm",
            "rollout.vllm.max_running=32",
            "rollout.max_invalid_fraction=0",
            "model.build.head_dim=32",  # vLLM's smallest on a CPU
            "run.max_rounds=2",
        )
    )
    lines = [json.loads(line) for line in (Path(outcome.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "status/finished" in line] == [1, 2]
    assert all(line["status/invalid"] == 0 for line in lines[1:])
    summary = json.loads((outcome.run_dir / "summary.json").read_text())
    assert summary["steps"] == 2
