"""`make gpu` on a machine without a GPU: the same steps, small, with the packages of one process alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import machine

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_steps",
    [
        2,
        pytest.param(
            len(machine.STEPS), marks=[pytest.mark.nightly, pytest.mark.xdist_group("vllm")], id="all"
        ),
    ],
)
def test_steps_run_with_the_packages_of_one_process_alone(tmp_path: Path, num_steps: int) -> None:
    """All in one process, for speed. The first ones update weights and sample."""
    path = os.pathsep.join(map(str, (ROOT / "tests/gpu/core_only", ROOT / "src", ROOT)))
    names = [step.__name__ for step in machine.STEPS[:num_steps]]
    command = [sys.executable, "-m", "tests.gpu.in_one_process", "cpu", *names]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_observations_of_a_batched_simulator_stay_on_its_device() -> None:
    """The step needs Gymnasium, which is not among the packages of the test above."""
    assert machine.simulators(machine.Machine(torch.device("cpu"), is_tiny=True)) == {"episodes": 6}


@pytest.mark.slow
def test_a_step_that_fails_is_reported_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step on CUDA, without a GPU; the same step works on the CPU. Each is in a separate process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "src", ROOT))))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(machine.LIMIT_S, "offloading", 600)  # not a GPU's limit, on a busy machine
    steps: dict[str, dict[str, Any]] = {}
    for device, is_failure in (("cpu", False), ("cuda", True)):
        report = tmp_path / f"{device}.json"
        arguments = ["--tiny", "--output", str(report), "--only", "offloading", "--device", device]
        monkeypatch.setattr(sys, "argv", ["machine.py", *arguments])
        assert machine.main() == is_failure
        steps[device] = json.loads(report.read_text())["steps"]["offloading"]
    assert steps["cpu"]["result"]["weights_bytes"] > 0
    assert "Traceback" in steps["cuda"]["error"]
