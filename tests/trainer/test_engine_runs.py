"""Whole runs with an engine outside of the training process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.needs import WITH_VLLM

from braid.trainer import commands

from .conftest import LoadTiny

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.xdist_group("vllm"),
                WITH_VLLM,
            ],
        ),
        "sglang",
    ],
)
def test_a_run_learns_with_an_engine_in_a_separate_process(
    load_tiny: LoadTiny, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "sglang":
        use_sglang_like(monkeypatch)
    outcome = commands.train(
        load_tiny(
            f"rollout.engine={engine}",
            "rollout.engine.max_running=32",
            "rollout.max_invalid_fraction=0",
            "model.build.head_dim=32",  # vLLM's smallest on a CPU
            "run.max_rounds=2",
        )
    )
    lines = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "status/finished" in line] == [1, 2]
    assert all(line["status/invalid"] == 0 for line in lines[1:])
    summary = json.loads((outcome.run_dir / "summary.json").read_text())
    assert summary["steps"] == 2
    assert (outcome.run_dir / "logs" / "engine_0.log").exists()


def use_sglang_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process and those that it starts find the stand-in for SGLang."""
    package = HERE.parent / "contracts" / "sglang_package"
    monkeypatch.setattr("braid.plan.available.count_gpus", lambda: 1)  # SGLang itself needs one
    monkeypatch.syspath_prepend(package)
    monkeypatch.setenv("PYTHONPATH", f"{package}:{REPOSITORY}")
