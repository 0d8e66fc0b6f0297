"""Errors of clusters that cannot be joined; tests that need a cluster are in
tests/trainer/test_clusters.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray  # noqa: TID251
from ray._private import services  # noqa: TID251
from tests.leftovers import await_end

from braid.cluster import machines
from braid.cluster.machines import connect, leave
from braid.config.cluster import ClusterConfig
from braid.errors import ConfigError, WorkerError


@pytest.fixture
def closed_address() -> str:
    """A local address without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.timeout(600)  # Ray alone tries for a quarter of an hour
def test_an_address_without_a_server_is_reported_in_seconds(
    closed_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=f"cannot join the Ray cluster '{closed_address}': no cluster answers there"
    ):
        connect(ClusterConfig(address=closed_address), num_processes=1)
    monkeypatch.setenv("RAY_ADDRESS", closed_address)
    for address in (None, "auto"):
        with pytest.raises(ConfigError, match="no cluster answers there"):
            connect(ClusterConfig(address=address), num_processes=1)
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_an_address_of_another_server_is_reported_in_seconds(answer: bytes | None) -> None:
    with socket.create_server(("127.0.0.2", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(300.0)

        def serve() -> None:
            line, _ = server.accept()
            with line:
                line.recv(100)
                if answer is None:
                    line.recv(100)  # until the other side gives up
                else:
                    line.sendall(answer)

        pool.submit(serve)
        address = f"127.0.0.2:{server.getsockname()[1]}"  # Ray takes 127.0.0.1 for the machine's own
        with pytest.raises(
            ConfigError, match=f"cannot join the Ray cluster '{address}': no cluster answers there"
        ):
            connect(ClusterConfig(address=address), num_processes=1)
    assert not ray.is_initialized()


@pytest.mark.parametrize("is_long", [True, False])
def test_a_folder_in_which_ray_cannot_start_is_named(
    is_long: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / ("x" * 100)) if is_long else "/proc/nowhere"
    monkeypatch.setenv("RAY_TMPDIR", folder)
    with pytest.raises(ConfigError, match=rf"cannot start Ray on this machine \(.*RAY_TMPDIR \({folder}\)"):
        connect(ClusterConfig(), num_processes=1)
    assert not ray.is_initialized()
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE"} & os.environ.keys()


@pytest.mark.parametrize("address", ["ray://localhost:10001", "localhost", "localhost:port"])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:6379"):
        connect(ClusterConfig(address=address), num_processes=1)


def test_several_machines_are_not_started_from_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r"the run needs 2 machines.* `ray start --head` here.* or set "
        r"cluster.num_nodes=1",
    ):
        connect(ClusterConfig(num_nodes=2), num_processes=1)


class _LateRaylet:
    """Ray's lookup of the node that has just started; the first `num_failures` times it fails as Ray's own
    limit does."""

    def __init__(self, num_failures: int, answer: Any) -> None:
        self._num_left, self._answer = num_failures, answer
        self.started: list[psutil.Process] = []

    def __call__(self, *args: Any) -> Any:
        if self._num_left == 0:
            return self._answer(*args)
        self._num_left -= 1
        self.started += psutil.Process().children()
        raise Exception("The current node timed out during startup.")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_start_of_ray_that_times_out_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = _LateRaylet(1, services.get_node)
    monkeypatch.setattr(services, "get_node", late)
    assert connect(ClusterConfig(), num_processes=1)
    try:
        assert len(late.started) >= 2
        await_end(late.started)
        assert "timed out during startup.); retrying" in caplog.text
        assert ray.get(ray.remote(num_cpus=0)(lambda: 3).remote()) == 3
    finally:
        leave()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_ray_has_ended_when_the_cluster_is_left_although_it_takes_longer_than_ray_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = set(psutil.Process().children())
    assert connect(ClusterConfig(), num_processes=1)
    started = set(psutil.Process().children()) - others
    wait = subprocess.Popen.wait

    def late(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout == 1:  # as on a busy machine
            raise subprocess.TimeoutExpired(process.args, timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", late)
    leave()
    assert len(started) >= 2
    assert not started & set(psutil.Process().children()), "none is left as a zombie either"


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_ray_that_never_starts_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    late = _LateRaylet(-1, services.get_node)
    monkeypatch.setattr(services, "get_node", late)
    with pytest.raises(
        WorkerError, match=r"in 1 attempts over .*timed out.*raise cluster.start_timeout_s \(0.01\)"
    ):
        connect(ClusterConfig(start_timeout_s=0.01), num_processes=1)
    await_end(late.started)
    assert not ray.is_initialized()
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_MODE"} & os.environ.keys()


def test_folders_of_sessions_whose_run_was_killed_are_removed_by_the_next_start(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    used = tmp_path / f"session_2_{ended.pid}"
    kept = {
        "of a driver that runs": tmp_path / f"session_1_{os.getpid()}",
        "with a process that is left": used,
        "of another program": tmp_path / f"session_3_{ended.pid}",
    }
    old, current = tmp_path / f"session_4_{ended.pid}", tmp_path / f"session_5_{os.getpid()}"
    for folder in (*kept.values(), old, current):
        folder.mkdir()
    for folder in (kept["of a driver that runs"], used, old):
        (folder / machines._STARTED_BY_RUN).touch()
    command = [sys.executable, "-c", "print(flush=True); input()", str(used)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # until its command line can be read: just after its start it has none
        machines._remove_old_sessions(current)
        assert all(folder.exists() for folder in (*kept.values(), current))
    assert not old.exists()
    machines._remove_old_sessions(current)
    assert not used.exists()
