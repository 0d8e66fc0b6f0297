"""GPU tests, live runs, runs on Ray and the steps of `make gpu` pass on the fake device, each in a separate
process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.fake_cuda import REPOSITORY, environment
from tests.gpu import machine

NUM_DEVICES = 3
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "gpu/test_training.py": {},
    "gpu/test_native_engine.py fake_cuda/on_device/test_device.py fake_cuda/on_device/test_streams.py "
    "fake_cuda/on_device/test_waits.py": {},
    "fake_cuda/on_device/test_live_runs.py": {"FAKE_CUDA_OWN_IPC": "1"},  # threads stand in for processes
    "fake_cuda/on_device/test_clusters.py": {
        "FAKE_CUDA_DEVICES": f"{NUM_DEVICES}",
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": NUM_DEVICES}),
    },
}
"""Files with tests that share a process, and what they need in the environment beside the device."""
_GROUPS = {"fake_cuda/on_device/test_clusters.py": [pytest.mark.xdist_group("workers")]}
STEPS = [s.__name__ for s in machine.STEPS if s.__name__ not in ("tests", "engines", "offloading")]
"""Steps of `make gpu` but that of the tests above, that of engines, which are not built for the device, and
one that asks another process for the device's free memory, of which each process has its own count."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paths", "tier"),
    [
        pytest.param(path, tier, marks=_GROUPS.get(path, []) + [pytest.mark.nightly] * (tier == "nightly"))
        for path, tier in [
            *((path, "not nightly") for path in ENVIRONMENTS if "live_runs" not in path),
            ("fake_cuda/on_device/test_clusters.py", "nightly"),
            ("fake_cuda/on_device/test_live_runs.py", "nightly"),
        ]
    ],
)
def test_tests_pass_on_the_device(paths: str, tier: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--show-capture=no", "-m", tier, *(f"tests/{path}" for path in paths.split())],
        env=environment(**ENVIRONMENTS[paths]),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_steps_of_make_gpu_run_on_the_device() -> None:
    """Small, without their time limits, which are those of a GPU, and all in one process, for speed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.in_one_process", "cuda", *STEPS],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
