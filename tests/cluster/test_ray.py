"""Worker groups on Ray: calls by rank, and failures that name the worker."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.leftovers import LIMIT_S

from braid.cluster.oom import KillCount
from braid.cluster.ray import RayGroup, connect, disconnect
from braid.cluster.reports import give_up
from braid.cluster.status import status_on_signal
from braid.cluster.workers import Joined, Place, wait_for_all
from braid.config.cluster import ClusterConfig
from braid.cores import PASSIVE, num_cores
from braid.errors import EngineError, WorkerError

from .test_status import status

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


def test_tests_with_workers_share_one_process_of_pytest(request: pytest.FixtureRequest) -> None:
    """Ray clusters that start beside each other on two cores time out; a pytest that drops the groups would
    let them."""
    assert request.node.nodeid.endswith("@ray") == ("PYTEST_XDIST_WORKER" in os.environ)


class Worker:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._opened = threading.Event()

    def pass_gate(self) -> int:
        assert self._opened.wait(LIMIT_S)
        return self._place.rank

    def open_gate(self) -> None:
        self._opened.set()

    def add(self, a: int, b: int) -> int:
        return a + b + self._place.rank

    def ranks(self) -> list[int]:
        return list(range(self._place.rank + 1))

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("no such thing")

    def tell(self) -> None:
        raise EngineError("the engine ended. Its log:\n  nothing of note")

    def die(self) -> None:
        if self._place.rank == 1:
            sys.stderr.write("the disk is full of cats\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S)

    def hang(self, pids: Path) -> None:
        (pids / str(os.getpid())).touch()
        time.sleep(LIMIT_S)

    def stop(self, pids: Path) -> None:
        child = subprocess.Popen(["sleep", "600"])
        (pids / str(child.pid)).touch()
        (pids / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(LIMIT_S)  # the signal may reach another thread first, and this one would answer

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def address(self) -> str:
        assert self._place.address is not None
        return self._place.address

    def give_up(self) -> None:
        give_up("no engine")

    def say(self) -> None:
        sys.stdout.write("to the terminal\n")
        sys.stdout.flush()
        subprocess.run(["echo", "from a child"], check=True)
        for _ in range(2):
            logging.getLogger("x").warning("little disk left")
        logging.getLogger("braid").info("all well")
        warnings.warn("old way", stacklevel=1)
        logging.getLogger("x").error("rank %d", self._place.rank)

    def fail_late(self) -> None:
        """Fail like a rank that has lost its connection to a dead one, before that death is known."""
        if self._place.rank == 1:
            time.sleep(0.3)
            os._exit(1)
        raise RuntimeError("connection closed by peer")


class Threads:
    def __init__(self, place: Place) -> None:
        self._is_early = "torch" not in sys.modules

    def about(self) -> tuple[bool, str | None, int]:
        """Whether braid came before torch; how OpenMP's threads wait; their number."""
        import torch

        return self._is_early, os.environ.get("OMP_WAIT_POLICY"), torch.get_num_threads()


class Beside:
    """A worker in the process of another one."""

    def __init__(self, place: Place) -> None:
        self._first, self._rank = place.workers["main"], place.rank

    def sum(self, number: int) -> int:
        return self._first.add(number, 1) + self._rank

    def fail(self) -> None:
        raise ValueError("no such thing")

    def count(self, items: list[int]) -> int:
        return len(items)


class Broken:
    def __init__(self, place: Place) -> None:
        raise OSError("no model here")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in PASSIVE:  # as a cluster that was started without braid
            patch.delenv(name, raising=False)
        connect(ClusterConfig(), num_processes=2)
    yield
    disconnect()


def _group(config: ClusterConfig | None = None) -> RayGroup:
    return RayGroup("policy", 2, config or ClusterConfig()).make(Worker)


def test_threads_of_workers_wait_passively_and_have_their_share_of_the_cores() -> None:
    group = RayGroup("policy", 2, ClusterConfig(), env={"OMP_NUM_THREADS": None}, sharing=[1, 99]).make(
        Threads
    )
    assert group.call(Threads.about) == [(True, "PASSIVE", num_cores()), (True, "PASSIVE", 1)]
    group.close()


def test_calls_reach_every_rank_and_results_are_ordered_by_rank() -> None:
    group = _group()
    assert group.call(Worker.add, 1, 2) == [3, 4]
    assert group.scatter(Worker.add, [(1, 2), (30, 40)]) == [3, 71]
    group.close()


def test_the_configs_environment_reaches_workers() -> None:
    group = _group(ClusterConfig(env={"BRAID_TEST": "here"}))
    assert group.call(Worker.env, "BRAID_TEST") == ["here", "here"]
    group.close()


def test_a_call_that_waits_beside_others_is_answered_first_if_it_finishes_first() -> None:
    group = _group()
    waiting = [group.start_beside(rank, Worker.pass_gate) for rank in range(2)]
    assert group.call(Worker.add, 1, 2) == [3, 4]
    group.start_on(1, Worker.open_gate).wait()
    (answered,) = group.wait_any(waiting)
    assert answered is waiting[1]
    assert answered.wait() == [1]
    failing = group.start_beside(1, Worker.fail)
    with pytest.raises(WorkerError, match=r"policy worker 1 of 2 failed while in fail\(\)"):
        group.wait_any([failing])


def test_sigusr1_says_which_workers_are_waited_for_and_they_write_their_stacks(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    group = RayGroup("policy", 2, ClusterConfig()).make(Worker, tmp_path / "logs")
    pids = group.call(Worker.pid)
    waiting = [group.start_beside(rank, Worker.pass_gate) for rank in range(2)]
    group.start_on(0, Worker.open_gate).wait()
    assert waiting[0].wait() == [0]
    with status_on_signal(lambda: "after round 3: update for 2.0 s"):
        first, waits = status(caplog).splitlines()
    assert first == "SIGUSR1: after round 3: update for 2.0 s"
    assert re.fullmatch(
        rf"  waits for policy 1 of 2 in pass_gate\(\) for \d+\.\d s \(pid {pids[1]} on .*\)", waits
    )
    os.kill(pids[1], signal.SIGUSR1)
    group.start_on(1, Worker.open_gate).wait()
    assert waiting[1].wait() == [1]
    assert "in pass_gate\n" in (tmp_path / "logs/policy-1.log").read_text()
    group.close()


def test_a_failure_on_one_side_of_an_exchange_ends_the_wait_for_the_other() -> None:
    sender, receiver = _group(), _group()
    calls = [(sender, sender.start(Worker.pass_gate)), (receiver, receiver.start(Worker.tell))]
    with pytest.raises(WorkerError, match=r"failed while in tell\(\): EngineError: the engine ended"):
        wait_for_all(calls)
    assert not sender.wait_any([calls[0][1]], 0.0)  # it waits on
    sender.close()


def test_calls_of_several_ranks_are_waited_for() -> None:
    one, other = _group(), _group()
    calls = [(one, one.start(Worker.add, 1, 2)), (other, other.start(Worker.pass_gate))]
    assert not other.is_done(calls[1][1], 0.1)
    for rank in range(2):
        other.start_beside(rank, Worker.open_gate).wait()
    wait_for_all(calls)
    assert [call.wait() for _, call in calls] == [[3, 4], [0, 1]]
    one.close()
    other.close()


def test_workers_know_the_address_of_their_machine() -> None:
    group = _group()
    addresses = group.call(Worker.address)
    assert addresses[0] == addresses[1]
    assert addresses[0].count(".") == 3 or ":" in addresses[0]
    group.close()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fail", r"policy worker \d of 2 failed while in fail\(\): .*no such thing"),
        (
            "tell",
            r"policy worker \d of 2 failed while in tell\(\): EngineError: the engine ended\. Its log:\n  nothing",
        ),
        ("die", r"policy worker 1 of 2 died while in die\(\): .*\(pid \d+ on .*full of cats"),
    ],
)
def test_a_worker_that_fails_ends_its_group_with_its_name(method: str, message: str) -> None:
    group = _group()
    pids = group.call(Worker.pid)
    with pytest.raises(WorkerError, match=message):
        group.call(getattr(Worker, method))
    _await_end(pids)


def test_the_dead_worker_is_named_rather_than_the_disconnected_one() -> None:
    with pytest.raises(WorkerError, match=r"policy worker 1 of 2 died while in fail_late\(\)"):
        _group().call(Worker.fail_late)


def test_a_call_on_one_rank_names_that_rank_and_ends_the_group() -> None:
    group = _group()
    assert group.start_on(1, Worker.add, 1, 2).wait() == [4]
    with pytest.raises(WorkerError, match=r"policy worker 1 of 2 failed while in fail\(\)"):
        group.start_on(1, Worker.fail).wait()


@pytest.mark.parametrize("is_oom", [False, True])
def test_an_idle_worker_that_is_killed_ends_the_calls_of_every_group(
    is_oom: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lack of memory is the reason only if the kernel has counted such a kill."""
    counter = tmp_path / "memory.events"
    counter.write_text("oom 0\noom_kill 3\n")
    monkeypatch.setattr("braid.cluster.ray.KillCount", partial(KillCount, counter))
    group, other = _group(), RayGroup("rollout", 1, ClusterConfig()).make(Worker)
    pid = group.call(Worker.pid)[1]
    waiting = other.start(Worker.pass_gate)
    if is_oom:
        counter.write_text("oom 1\noom_kill 4\n")
    os.kill(pid, signal.SIGKILL)
    why = "it ran out of memory and was killed: lower" if is_oom else "its process was killed or crashed"
    with pytest.raises(
        WorkerError,
        match=rf"policy worker 1 of 2 died while rollout was in pass_gate\(\): {why}.*last call was pid\(\)",
    ):
        waiting.wait()
    group.close()


RAYLET = """
import os, signal, sys, time
from braid.cluster.ray import RayGroup, connect
from braid.config.cluster import ClusterConfig
from braid.errors import WorkerError

class Worker:
    def __init__(self, place): pass
    def raylet(self): return os.getppid()
    def wait(self): time.sleep(1000)

connect(ClusterConfig(), num_processes=2)
policy, critic = (RayGroup(role, 1, ClusterConfig()).make(Worker) for role in ("policy", "critic"))
raylet = policy.call(Worker.raylet)[0]
waiting = critic.start(Worker.wait)
os.kill(raylet, signal.SIGKILL)
try:
    waiting.wait()
except WorkerError as error:
    sys.stdout.write(f"{raylet == int(str(error).split('pid ')[1].split()[0])}: {error}")
sys.stdout.flush()
os._exit(0)
"""


def test_a_raylet_that_is_killed_is_named_instead_of_a_worker(tmp_path: Path) -> None:
    """In a program of its own, which loses its cluster."""
    (tmp_path / "driver.py").write_text(RAYLET)
    ended = subprocess.run(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "True: Ray's raylet died while" in ended.stdout, ended
    assert "was killed or crashed, and the workers on that machine ended with it" in ended.stdout


def test_a_worker_that_gives_up_ends_the_calls_in_progress_with_its_reason() -> None:
    group = _group()
    waiting = group.start_on(0, Worker.pass_gate)
    group.start_on(1, Worker.give_up)  # whose own answer may come after the report
    with pytest.raises(
        WorkerError, match=r"policy worker 1 of 2 cannot continue while in pass_gate\(\): no engine \(pid"
    ):
        waiting.wait()


def test_warnings_of_ranks_are_logged_once_and_everything_is_in_their_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that a rank logs twice is reported twice, whenever the other logs it."""
    group = RayGroup("policy", 2, ClusterConfig()).make(Worker, tmp_path)
    with caplog.at_level(logging.WARNING):
        group.call(Worker.say)
        deadline = time.monotonic() + LIMIT_S
        while not all(f"policy worker {rank} of 2: rank {rank}" in caplog.text for rank in range(2)):
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.02)
    group.close()
    for text, number in (("little disk left", 2), ("old way", 1), ("all well", 0)):
        assert sum(text in message for message in caplog.messages) == number
    log = (tmp_path / "policy-1.log").read_text()
    for text in (
        "to the terminal",
        "from a child",
        "WARNING x: little disk left",
        "INFO braid: all well",
        "ERROR x: rank 1",
    ):
        assert text in log


def test_references_bring_values_from_one_group_to_another() -> None:
    group, other = _group(), _group()
    sums = group.start(Worker.add, 1, 2)
    assert other.call(Worker.add, sums.refs[0], sums.refs[1]) == [7, 8]
    group.close()
    other.close()


def test_further_workers_share_a_process_and_end_alone() -> None:
    group = _group()
    other = group.add("critic", Beside)
    assert other.call(Beside.sum, 4) == [5, 7]
    failing = other.start_on(1, Beside.fail)
    lists = [group.start_on(rank, Worker.ranks).refs[0] for rank in (1, 0)]
    assert other.call(Beside.count, Joined(lists)) == [3, 3]
    other.close()
    assert group.call(Worker.add, 1, 2) == [3, 4]
    with pytest.raises(
        WorkerError, match=r"policy worker 1 of 2 failed while in critic\.fail\(\): .*no such"
    ):
        failing.wait()


def test_a_worker_that_hangs_ends_its_group_at_the_deadline(tmp_path: Path) -> None:
    group = _group(ClusterConfig(call_timeout_s=2.0))
    with pytest.raises(WorkerError, match=r"workers 0, 1 of 2 did not answer in time while in hang\(\)"):
        group.call(Worker.hang, tmp_path)
    _await_end([int(file.name) for file in tmp_path.iterdir()])


def test_stopped_workers_end_with_all_their_child_processes(tmp_path: Path) -> None:
    group = _group(ClusterConfig(call_timeout_s=5.0))
    with pytest.raises(
        WorkerError, match=r"policy workers 0, 1 of 2 did not answer in time while in stop\(\)"
    ):
        group.call(Worker.stop, tmp_path)
    _await_end([int(file.name) for file in tmp_path.iterdir()])


def test_a_worker_that_cannot_be_built_reports_the_reason() -> None:
    with pytest.raises(WorkerError, match=r"policy worker \d of 2 failed while being built: .*no model here"):
        RayGroup("policy", 2, ClusterConfig()).make(Broken)


def _await_end(pids: list[int]) -> None:
    """No process of the group is left behind."""
    deadline = time.monotonic() + LIMIT_S
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"some of {pids} still run"
        time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split(")")[1].split()[0] != "Z"
    except OSError:
        return False
