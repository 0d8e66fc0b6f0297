"""`make gpu` on a machine without a GPU: the same steps, small, with the packages of one process alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/gpu/machine.py"
ALL_STEPS = """
import torch
from tests.gpu.machine import STEPS, Machine

if __name__ == "__main__":
    for step in STEPS:
        assert isinstance(step(Machine(torch.device("cpu"), is_tiny=True)), dict), step
"""


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_every_step_runs_with_the_packages_of_one_process_alone(tmp_path: Path) -> None:
    """All in one process, for speed."""
    (tmp_path / "all_steps.py").write_text(ALL_STEPS)
    path = os.pathsep.join(map(str, (ROOT / "tests/gpu/core_only", ROOT / "src", ROOT)))
    command = [sys.executable, str(tmp_path / "all_steps.py")]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_a_step_that_fails_is_reported_with_its_traceback_and_the_others_go_on(tmp_path: Path) -> None:
    """A step on CUDA, without a GPU."""
    report, path = tmp_path / "gpu.json", os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    command = [sys.executable, str(SCRIPT), "--tiny", "--output", str(report), "--only", "offloading"]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([*command, "--device", "cpu"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text())["steps"]["offloading"]["result"]["weights_bytes"] > 0
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [*command, "--device", "cuda"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" in json.loads(report.read_text())["steps"]["offloading"]["error"]
