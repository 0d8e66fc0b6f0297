"""Environment variables of worker processes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from braid.cluster.machines import Machine, Machines
from braid.cluster.ray import _Host
from braid.config.load import load_config
from braid.trainer.cluster import ROWS, environment_of

MEGATRON = ["model.build={}", "train.backend=megatron", "train.backend.tensor_parallel=2"]


def test_kernels_of_tensor_parallel_megatron_are_launched_through_one_connection() -> None:
    config = load_config(None, [*MEGATRON, "critic.train={backend: fsdp2}"]).config
    name = "CUDA_DEVICE_MAX_CONNECTIONS"  # FSDP needs several, to overlap
    assert [environment_of(config, role).get(name) for role in ("policy", "critic", "rollout", ROWS)] == [
        "1",
        None,
        None,
        None,
    ]


def test_ranks_record_their_last_collectives() -> None:
    config = load_config(None, ["model.build={}"]).config
    assert environment_of(config, "policy").items() >= {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }.items()  # fmt: skip


@pytest.mark.parametrize("name", ["policy", "rollout", "env"])
def test_workers_have_their_share_of_the_cores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets the number of threads to 1; child processes, such as engines, inherit it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(*overrides: str, **env: str) -> str:
        variables = {**environment_of(load_config(None, ["model.build={}", *overrides]).config, name), **env}
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        _Host(variables, is_local=False, num_sharing=3)
        return os.environ.pop("OMP_NUM_THREADS")

    assert threads() == "5"
    assert threads("run.num_threads=2") == "2"
    assert threads(OMP_NUM_THREADS="7") == "7"  # of cluster.env
    monkeypatch.setenv("OMP_NUM_THREADS", "6")  # the user's, in the driver's environment
    assert threads() == "6"


def test_the_rollout_buffer_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _Host(environment_of(load_config(None, ["model.build={}"]).config, ROWS), is_local=False)
    assert os.environ["OMP_NUM_THREADS"] == "1"


def _variables(machines: list[Machine], **variables: str) -> dict[str, str]:
    reserved: Any = Machines.__new__(Machines)
    reserved._machines, reserved._devices_per_node = machines, 1
    placement: Any = SimpleNamespace(node=0, devices=())
    return reserved.spot(placement, variables)[1]


def test_gloo_and_nccl_use_the_interface_by_which_other_machines_reach_this_one() -> None:
    one, other = (Machine("0" * 56, address, interface="eth1") for address in ("10.0.0.1", "10.0.0.2"))
    assert _variables([one, other]) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    variables = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert _variables([one, other], **variables) == {**variables, "NCCL_SOCKET_IFNAME": "=eth0"}
    assert not _variables([one])
