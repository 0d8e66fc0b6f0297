"""Runs on two machines (tests/machines.py): the same numbers as one process, and failures of network and
machines."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.leftovers import LIMIT_S, await_end
from tests.machines import Cluster, Machine, environment, need_machines, two_machines
from tests.needs import WITH_VLLM
from tests.trainer.test_clusters import metrics, run_config

from braid.config.load import load_config
from braid.trainer import commands

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

Settings = dict[str, Any]

_OPTIMIZER = {"lr": 1e-3, "eps": 1e-5}
_ON_BOTH = {"policy": "0-1", "rollout": "1"}
_FSDP2: Settings = {"train": {"backend": "fsdp2", "optimizer": _OPTIMIZER}}
_PPO: Settings = {
    "algorithm": {"recipe": "ppo", "kl_coef": 0.05},
    "train": {"optimizer": _OPTIMIZER},
    "critic": {"train": {"optimizer": _OPTIMIZER}},
}
_RUNS: dict[str, tuple[dict[str, str], Settings]] = {
    "fsdp2": (_ON_BOTH, _FSDP2),
    "deepspeed": (_ON_BOTH, {"train": {"backend": "deepspeed", "optimizer": _OPTIMIZER}}),
    "ppo": ({"policy,reference": "0", "critic,rollout": "1"}, _PPO),
}
"""Placements and settings."""
_ROUNDS = 6


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that both machines see."""
    need_machines()
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Cluster]:
    """For runs that leave both machines as they are."""
    with two_machines(shared) as cluster:
        yield cluster


@pytest.fixture
def fragile(shared: Path) -> Iterator[Cluster]:
    """For one test, which may break it."""
    with two_machines(shared) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(shared: Path) -> list[dict[str, float]]:
    """Metrics of a run in one process."""
    return metrics(commands.train(load_config(run_config(shared / "alone", {}, rounds=_ROUNDS))).run_dir)


def _assert_same(mine: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    """Sums of losses and log-probs differ by their order; sampled tokens do not while weights agree to
    float32's rounding."""
    for one_round, expected in zip(mine, other, strict=True):
        assert one_round == pytest.approx(expected, rel=1e-3, abs=1e-4, nan_ok=True)


def _spread(folder: Path, placement: dict[str, str], sections: Settings, *, rounds: int = 2) -> Path:
    """The config of a run whose device `i` is on machine `i`."""
    cluster = {"address": "auto", "num_nodes": 2, "devices_per_node": 1, "placement": placement}
    return run_config(folder, {**sections, "cluster": cluster}, rounds=rounds)


@contextmanager
def _driven(machine: Machine, path: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """A driver on the machine, which writes to `said` beside the config."""
    command = machine.command(
        sys.executable, "-X", "faulthandler", "-m", "braid.cli.main", "train", str(path), "report.console=plain", *overrides,
    )  # fmt: skip
    with (
        (path.parent / "said").open("w") as said,
        subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment()) as driver,
    ):
        try:
            yield driver
        finally:
            for process in psutil.Process(driver.pid).children() if driver.poll() is None else []:
                process.send_signal(signal.SIGABRT)  # shows where it hangs
                psutil.wait_procs([process], 5.0)
                process.kill()
                sys.stdout.write((path.parent / "said").read_text())


def _train(machine: Machine, path: Path, *overrides: str) -> tuple[int, str]:
    """The exit code of a run, and what it said."""
    with _driven(machine, path, *overrides) as driver:
        code = driver.wait(LIMIT_S)
    return code, (path.parent / "said").read_text()


def _await(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def _await_step(path: Path, step: int) -> None:
    _await(
        (path.parent / f"run/checkpoints/step_{step}").exists,
        f"no step {step}: {(path.parent / 'said').read_text()}",
    )


def _workers(machine: Machine, role: str = "") -> list[psutil.Process]:
    """The processes of a run's workers on a machine; those of one role."""
    titles = (
        (f"ray::{role}",)
        if role
        else ("ray::policy", "ray::critic", "ray::rollout", "ray::rows", "ray::Holder")
    )
    workers: list[psutil.Process] = []
    for process in machine.processes():
        try:
            if process.cmdline()[0].startswith(titles):
                workers.append(process)
        except (psutil.Error, IndexError):
            continue
    return workers


def _assert_empty(cluster: Cluster) -> None:
    for machine in (cluster.one, cluster.other):
        await_end(_workers(machine))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "fsdp2")) for name in _RUNS]
)
def test_runs_on_two_machines_match_one_process(
    name: str, cluster: Cluster, shared: Path, alone: list[dict[str, float]]
) -> None:
    """The machines have no default route: weights are sent to the addresses that Ray knows."""
    placement, sections = _RUNS[name]
    path = _spread(shared / name, placement, sections)
    code, said = _train(cluster.one, path)
    assert code == 0, said
    if name == "ppo":
        alone = metrics(commands.train(load_config(run_config(shared / "ppo-alone", _PPO))).run_dir)
    _assert_same(metrics(path.parent / "run"), alone[:3])
    _assert_empty(cluster)


@pytest.mark.nightly
def test_a_pipeline_over_two_machines_keeps_its_bound_on_the_lag(
    cluster: Cluster, shared: Path, alone: list[dict[str, float]]
) -> None:
    """Its first round, whose tokens are all sampled from the first weights, is that of one process."""
    path = _spread(shared / "lag", {"policy": "0", "rollout": "1"}, {"pipeline": {"max_lag": 2}}, rounds=4)
    code, said = _train(cluster.one, path)
    assert code == 0, said
    _, *rounds = metrics(path.parent / "run")
    assert len(rounds) == 4
    assert max(line["pipeline/lag_max"] for line in rounds) <= 2
    for name in ("reward/mean", "policy/loss", "policy/grad_norm"):
        assert rounds[0][name] == pytest.approx(alone[1][name], rel=1e-3, abs=1e-4), name
    _assert_empty(cluster)


@WITH_VLLM
@pytest.mark.nightly
def test_vllm_on_the_other_machine_samples_from_the_weights_of_each_round(
    cluster: Cluster, shared: Path
) -> None:
    sampling = {"prompts_per_round": 4, "group_size": 4, "sampling": {"max_new_tokens": 6}}
    build = {"hidden_size": 64, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "head_dim": 32}
    sections: Settings = {
        "model": {"build": build},  # vLLM's smallest head on a CPU
        "train": {"optimizer": {"lr": 2e-2}},
        "rollout": {**sampling, "engine": "vllm", "check_weights": True},
    }
    path = _spread(shared / "vllm", {"policy": "0", "rollout": "1"}, sections, rounds=3)
    with _driven(cluster.one, path) as driver:
        _await_step(path, 1)
        commands_there: list[list[str]] = []
        for process in cluster.other.processes():
            with suppress(psutil.NoSuchProcess):
                commands_there.append(process.cmdline())
        assert any("braid.rollout.engines.vllm.process" in command for command in commands_there)
        assert driver.wait(LIMIT_S) == 0, (path.parent / "said").read_text()
    _, *rounds = metrics(path.parent / "run")
    assert len(rounds) == 3
    assert max(line["policy/logprob_mismatch_max"] for line in rounds) < 1e-3
    assert min(line["policy/grad_norm"] for line in rounds) > 0
    _assert_empty(cluster)


@pytest.mark.nightly
def test_a_run_folder_that_is_not_shared_is_refused(cluster: Cluster, shared: Path) -> None:
    path = _spread(shared / "unshared", _ON_BOTH, _FSDP2)
    code, said = _train(cluster.one, path, "run.output_dir=/tmp/own")
    assert code == 2, said
    assert re.search(
        rf"run.output_dir: the machine {cluster.other.address} has no /tmp/own/run/logs; choose a folder on a file system shared",
        said,
    )
    _assert_empty(cluster)


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["rollout", "rows"])
def test_a_signal_ends_a_run_whose_worker_on_the_other_machine_is_stopped(
    role: str, cluster: Cluster, shared: Path
) -> None:
    """In whatever the run waits for it: sampling, the transfer of a round's rows, or a sync of weights."""
    path = _spread(shared / f"stopped-{role}", {"policy": "0", "rollout": "1"}, {}, rounds=1000)
    with _driven(cluster.one, path, "run.stop_within_s=3") as driver:
        _await_step(path, 1)
        (worker,) = _workers(cluster.other, role)
        worker.suspend()
        (python,) = psutil.Process(driver.pid).children()
        python.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert driver.wait(LIMIT_S) == 130, (path.parent / "said").read_text()
        assert time.monotonic() - begin < 3 + 20, (path.parent / "said").read_text()
    _assert_empty(cluster)


@pytest.mark.nightly
def test_a_short_cut_is_survived_and_a_machine_that_loses_its_power_is_waited_for(
    fragile: Cluster, shared: Path, alone: list[dict[str, float]]
) -> None:
    path = _spread(shared / "power", _ON_BOTH, _FSDP2, rounds=_ROUNDS)
    with _driven(fragile.one, path, "run.max_restarts=1") as driver:
        _await_step(path, 1)
        fragile.other.cut()
        time.sleep(5.0)
        fragile.other.mend()
        _await_step(path, 3)
        fragile.other.close()
        said = path.parent / "said"
        _await(
            lambda: "waiting up to" in said.read_text() or driver.poll() is not None, "the run did not notice"
        )
        fragile.replace_other()
        assert driver.wait(LIMIT_S) == 0, said.read_text()
    text = " ".join(said.read_text().split())
    assert text.count("restart 1 of 1") == 1
    assert (
        text.count(
            "waiting up to 600 s (cluster.start_timeout_s) for the machine 10.77.0.2, which the Ray "
            "cluster has lost"
        )
        == 1
    )
    _assert_same(metrics(path.parent / "run"), alone)
    _assert_empty(fragile)


@pytest.mark.nightly
def test_a_lasting_cut_ends_the_run_with_the_machines_name_and_the_run_resumes(
    fragile: Cluster, shared: Path, alone: list[dict[str, float]]
) -> None:
    path = _spread(shared / "cut", _ON_BOTH, _FSDP2, rounds=_ROUNDS)
    with _driven(fragile.one, path) as driver:
        _await_step(path, 2)
        fragile.other.cut()
        assert driver.wait(LIMIT_S) == 1
    said = (path.parent / "said").read_text()
    assert re.search(r"WorkerError: \w+ worker \d of \d .*10\.77\.0\.2", said), said
    await_end(_workers(fragile.one))
    fragile.replace_other()
    code, said = _train(fragile.one, path, "run.resume=latest")
    assert code == 0, said
    _assert_same(metrics(path.parent / "run"), alone)
    _assert_empty(fragile)


_RESTART = """
import sys
from braid.cluster.machines import Machines, connect
from braid.config.cluster import ClusterConfig
config = ClusterConfig(address="auto", num_nodes=2, start_timeout_s=float(sys.argv[1]))
connect(config, num_processes=1)
Machines(config, [0, 0], 1)
print("reserved", flush=True)
sys.stdin.readline()
Machines(config, [0, 0], 1, is_restart=True)
"""


@pytest.mark.nightly
def test_a_machine_that_does_not_come_back_is_named(fragile: Cluster) -> None:
    """Ray has not noticed its end when the restart begins."""
    command = fragile.one.command(sys.executable, "-c", _RESTART, "20")
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment(), text=True, stdin=pipe, stdout=pipe, stderr=pipe
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "reserved\n"
        fragile.other.close()
        _, said = driver.communicate("\n", timeout=LIMIT_S)
    assert driver.returncode == 1
    assert (
        "MachineError: the machine 10.77.0.2 did not join the Ray cluster within 20 s "
        "(cluster.start_timeout_s)" in said
    )
    assert "version" not in said
