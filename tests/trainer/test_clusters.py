"""Existing Ray clusters: two Ray nodes on this machine, each declaring two GPUs that it does not have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray  # noqa: TID251
import yaml
from ray._raylet import GcsClient  # noqa: TID251  # pyright: ignore[reportAttributeAccessIssue]
from ray.cluster_utils import Cluster  # noqa: TID251
from tests.leftovers import LIMIT_S

import braid
from braid.cluster.ray import Machines, RayGroup, connect, disconnect
from braid.cluster.workers import Place
from braid.config.cluster import ClusterConfig
from braid.config.load import load_config
from braid.errors import ConfigError, WorkerError
from braid.plan import derive
from braid.plan.layout import Worker
from braid.trainer import commands
from braid.trainer.cluster import RayCluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]

_SIZE: dict[str, Any] = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80 * 2**20}

Settings = dict[str, Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    connect(
        ClusterConfig(), num_processes=1
    )  # one of this process, with a secret, may have been there before
    disconnect()
    cluster = Cluster(initialize_head=True, head_node_args={**_SIZE, "include_dashboard": False})
    try:
        cluster.add_node(**_SIZE)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def joined(cluster: Cluster) -> Iterator[ClusterConfig]:
    """This process is connected."""
    config = ClusterConfig(address=cluster.address, num_nodes=2)
    connect(config, num_processes=2)
    yield config
    disconnect()


def test_workers_start_on_the_machine_and_see_the_gpus_of_their_seats(joined: ClusterConfig) -> None:
    workers = [Worker(0, 1, (3,)), Worker(1, 0, (0, 1)), Worker(2, 1, (2,)), Worker(3, 0, ())]

    class Told:
        def __init__(self, place: Place) -> None:
            self._place = place

        def tell(self) -> tuple[str, str | None, int, tuple[int, ...]]:
            node, place = ray.get_runtime_context().get_node_id(), self._place
            return node, os.environ.get("CUDA_VISIBLE_DEVICES"), place.node, place.devices

    machines = Machines(joined, [2, 2], devices_per_node=2)
    assert not ray.available_resources().get("GPU"), "the run holds them"
    group = RayGroup("policy", workers, joined, machines=machines).make(Told)
    nodes, visible, *places = zip(*group.call(Told.tell), strict=True)
    group.close()
    machines.close()

    mine = ray.get_runtime_context().get_node_id()
    (other,) = {node["NodeID"] for node in ray.nodes()} - {mine}
    assert nodes == (other, mine, other, mine), "machine 0 is that of the driver"
    assert visible[:3] == ("1", "0,1", "0")
    assert places == [tuple(worker.node for worker in workers), tuple(worker.devices for worker in workers)]
    _await(lambda: ray.available_resources().get("GPU") == 4, "the GPUs are not given back")


@pytest.mark.parametrize(
    ("num_gpus", "message"),
    [
        (
            [0, 0, 0],
            r"needs 3 machines, but the Ray cluster has 2: .*ray start --address=.*cluster.num_nodes",
        ),
        (
            [2, 4],
            r"needs 2 machines with 4 GPUs each, but the Ray cluster has 2: .* \(2 GPUs\), .* \(2 GPUs\)",
        ),
    ],
)
def test_a_cluster_that_is_too_small_is_reported_with_its_resources(
    joined: ClusterConfig, num_gpus: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Machines(joined, num_gpus, devices_per_node=4)


def test_a_driver_without_gpus_does_not_leave_those_of_its_cluster_unused(joined: ClusterConfig) -> None:
    overrides = [f"cluster.address={joined.address}", "cluster.placement={policy: 0, rollout: 1}"]
    config = load_config(None, ["model.build={}", *overrides]).config
    layout = derive(config, None, "train").layout
    with pytest.raises(ConfigError, match=r"run.device: auto finds no GPU .* the Ray cluster has 4"):
        RayCluster.open(config, layout, is_pipelined=False)


def test_a_run_folder_missing_on_another_machine_is_reported(joined: ClusterConfig) -> None:
    mine = Path(f"/proc/self/task/{os.getpid()}")  # which no other process finds
    with pytest.raises(
        WorkerError, match=r"run.output_dir: the machine .* has no .*; choose a folder on a file system"
    ):
        RayGroup("policy", 1, joined).make(lambda place: place, mine)


def test_a_machine_with_another_braid_is_named(
    cluster: Cluster, joined: ClusterConfig, tmp_path: Path
) -> None:
    (tmp_path / "braid").mkdir()
    code = f"__version__ = '0.0.1'\n__path__ = {braid.__path__!r}\n"
    (tmp_path / "braid/__init__.py").write_text(code)
    other = cluster.add_node(**{**_SIZE, "num_gpus": 4}, env_vars={"PYTHONPATH": str(tmp_path)})
    try:
        with pytest.raises(ConfigError, match=f"has braid 0.0.1, but this one {braid.__version__}"):
            Machines(joined, [4], devices_per_node=4)
    finally:
        cluster.remove_node(other)


def test_a_cluster_with_another_ray_is_reported_with_both_versions(cluster: Cluster) -> None:
    client = GcsClient(address=cluster.address)
    key, space = b"CLUSTER_METADATA", b"cluster"
    stored = client.internal_kv_get(key, namespace=space)
    other = json.dumps({**json.loads(stored), "ray_version": "2.0.0"}).encode()
    client.internal_kv_put(key, other, True, namespace=space)
    try:
        with pytest.raises(
            ConfigError, match=rf"Ray: 2\.0\.0.* same versions as this machine: Ray {ray.__version__}"
        ):
            connect(ClusterConfig(address=cluster.address), num_processes=1)
    finally:
        client.internal_kv_put(key, stored, True, namespace=space)


@pytest.mark.nightly
def test_a_run_on_two_machines_matches_one_process_and_cleans_up_the_cluster(
    cluster: Cluster, tmp_path: Path
) -> None:
    alone = commands.train(load_config(run_config(tmp_path / "alone", {}))).run_dir
    over_both = {
        "train": {"backend": "fsdp2", "optimizer": {"lr": 1e-3, "eps": 1e-5}},
        "cluster": {
            "address": cluster.address,
            "num_nodes": 2,
            "devices_per_node": 1,
            "placement": {"policy": "0-1", "rollout": "1"},
        },
    }
    spread = commands.train(load_config(run_config(tmp_path / "spread", over_both))).run_dir
    for mine, other in zip(metrics(spread), metrics(alone), strict=True):
        # Sums of losses and log-probs differ by their order; sampled tokens do not while weights agree to
        # float32's rounding.
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-4, nan_ok=True)
    _assert_as_before(cluster)


@pytest.mark.nightly
def test_ctrl_c_removes_only_the_workers_of_the_run_from_the_cluster(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = run_config(tmp_path, {"cluster": {"runtime": "ray"}}, rounds=1000)
    command = [sys.executable, "-m", "braid.cli.main", "train", str(path)]
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    # A session of its own, as in a terminal.
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as driver:
        try:
            _await((tmp_path / "run/checkpoints/step_2").exists, "the run never saved")
            assert len(_workers()) == 3, "policy, rollout and rows are processes of the cluster"
            os.killpg(driver.pid, signal.SIGINT)
            _, said = driver.communicate(timeout=LIMIT_S)
            assert driver.returncode == 130, said
        finally:
            driver.kill()
    _assert_as_before(cluster)


def run_config(folder: Path, sections: Settings, *, rounds: int = 2) -> Path:
    task = {
        "kind": "procedural", "generator": "chain_sum", "size": 16,
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }  # fmt: skip
    config: Settings = {
        "run": {"name": "run", "output_dir": str(folder), "max_rounds": rounds, "device": "cpu", "num_threads": 1},
        "model": {"build": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "head_dim": 16}},
        "data": {"train": [task], "max_prompt_tokens": 128},
        "reward": {"parts": [{"kind": "function", "path": f"{folder}/even.py:even"}]},
        "rollout": {"prompts_per_round": 4, "group_size": 4, "sampling": {"max_new_tokens": 6}},
        "train": {"optimizer": {"lr": 1e-3, "eps": 1e-5}},
        "checkpoint": {"every_rounds": 1},
        "report": {"console": "none", "tensorboard": False},
        **sections,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "even.py").write_text(
        "def even(text):\n    return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)\n"
    )
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def metrics(run: Path) -> list[dict[str, float]]:
    """Metrics of each round, without those that depend on the clock or the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("time", "memory/", "reward/time/")) and not name.endswith("_per_s")
        }
        for line in lines
    ]


def _workers() -> list[psutil.Process]:
    """The worker processes of runs on this process's cluster."""
    workers: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = process.cmdline()[0]
        except (psutil.Error, IndexError):
            continue
        if title.startswith(("ray::policy", "ray::rollout", "ray::rows", "ray::Holder")):
            workers.append(process)
    return workers


def _assert_as_before(cluster: Cluster) -> None:
    """No worker is left, and the cluster runs."""
    assert not ray.is_initialized()
    _await(lambda: not _workers(), "workers are left")
    assert cluster.remaining_processes_alive()


def _await(is_so: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)
