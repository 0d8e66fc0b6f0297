"""Clusters that cannot be joined are told at once; the rest needs a cluster and is in tests/controller/test_clusters.py."""

from __future__ import annotations

import socket

import pytest
import ray  # noqa: TID251

from braid.config.cluster import ClusterConfig
from braid.errors import ConfigError
from braid.runtime.machines import connect


@pytest.fixture
def closed_address() -> str:
    """Of this machine, where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.timeout(60)  # Ray alone tries for a quarter of an hour
def test_an_address_where_nobody_answers_is_told_in_seconds(
    closed_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"'{closed_address}' cannot be joined: no cluster answers there"):
        connect(ClusterConfig(address=closed_address), num_processes=1)
    monkeypatch.setenv("RAY_ADDRESS", closed_address)
    for address in (None, "auto"):
        with pytest.raises(ConfigError, match="no cluster answers there"):
            connect(ClusterConfig(address=address), num_processes=1)
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["ray://localhost:10001", "localhost", "localhost:port"])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:6379"):
        connect(ClusterConfig(address=address), num_processes=1)


def test_several_machines_are_not_started_from_one() -> None:
    with pytest.raises(
        ConfigError, match=r"2 machines are wanted.* ray start --head here.* or set cluster.num_nodes=1"
    ):
        connect(ClusterConfig(num_nodes=2), num_processes=1)
