"""GPU tests and live runs pass on the fake device, each file in a separate process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.fake_cuda import REPOSITORY, environment


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "gpu/test_native_engine.py",
        "gpu/test_training.py",
        "fake_cuda/on_device/test_device.py",
        "fake_cuda/on_device/test_waits.py",
        "fake_cuda/on_device/test_live_runs.py",
    ],
)
def test_tests_pass_on_the_device(path: str) -> None:
    threads_for_processes = {"FAKE_CUDA_OWN_IPC": "1"} if "live_runs" in path else {}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--show-capture=no", f"tests/{path}"],
        env=environment(**threads_for_processes),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
