"""How OpenMP's threads wait, and how many cores there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from braid.cores import PASSIVE, num_cores, wait_passively

CHOICES = {
    "OMP_WAIT_POLICY": "ACTIVE",
    "GOMP_SPINCOUNT": "1234",
    "KMP_BLOCKTIME": "200",
    "KMP_LIBRARY": "turnaround",
}


def test_without_a_choice_of_the_user_threads_wait_passively() -> None:
    environment = {"PATH": "/bin"}
    wait_passively(environment)
    assert environment == {"PATH": "/bin", **PASSIVE}


@pytest.mark.parametrize(("name", "value"), CHOICES.items())
def test_each_choice_of_the_user_stands_alone(name: str, value: str) -> None:
    """GOMP_SPINCOUNT, for one, would have no effect beside some values of OMP_WAIT_POLICY in other
    libraries."""
    environment = {name: value}
    wait_passively(environment)
    assert environment == {name: value}


def _displayed(module: str, **variables: str) -> dict[str, str]:
    """The settings that the OpenMP library of PyTorch has taken, in a new process that imports a module of
    braid first."""
    plain = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}, torch"],
        env={**plain, "OMP_DISPLAY_ENV": "VERBOSE", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = (line.split("=", 1) for line in done.stderr.splitlines() if " = '" in line)
    return {name.split()[-1]: value.strip(" '") for name, value in pairs}


@pytest.mark.parametrize(
    "module",
    [
        "braid.cli.main",
        *(
            pytest.param(f"braid.{name}", marks=pytest.mark.slow)  # each imports torch
            for name in (
                "api",
                "cluster.ray",
                "envs.agents.processes",
                "envs.simulators.processes",
                "rewards.isolated",
                "isolation.session",
            )
        ),
    ],
)
def test_the_library_of_pytorch_waits_passively_in_each_kind_of_process(module: str) -> None:
    """Each is the first module of processes that braid starts."""
    environment = _displayed(module)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["GOMP_SPINCOUNT"] == "0"


@pytest.mark.slow
def test_the_library_of_pytorch_waits_as_the_user_says() -> None:
    assert _displayed("braid.api", GOMP_SPINCOUNT="1234")["GOMP_SPINCOUNT"] == "1234"
    assert _displayed("braid.api", OMP_WAIT_POLICY="ACTIVE")["OMP_WAIT_POLICY"] == "ACTIVE"


def test_torch_that_was_imported_before_braid_is_mentioned_and_children_wait_passively() -> None:
    code = "import logging, os, torch; logging.basicConfig(level='DEBUG'); import braid; print(os.environ['OMP_WAIT_POLICY'])"
    plain = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True)
    assert "torch was imported before braid" in done.stderr
    assert done.stdout.strip() == "PASSIVE"


def test_cores_are_those_of_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    assert num_cores(Path("/nonexistent")) == len(allowed)
    code = f"import os; os.sched_setaffinity(0, {{{min(allowed)}}}); from braid.cores import num_cores; print(num_cores())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "1"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 64),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"proc/self/cgroup": "0::/job/step", "sys/fs/cgroup/job/cpu.max": "400000 100000"}, 4),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/", "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "500000",
          "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000"}, 5),
    ],
)  # fmt: skip
def test_a_containers_quota_limits_the_cores(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert num_cores(tmp_path) == cores
