"""The liveness connection between driver and workers, with plain processes."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.leftovers import LIMIT_S

from braid.runtime.lifeline import Lifelines, Member, Ticket
from braid.runtime.oom import KillCount

"""For processes to start or end; far above what they need, since other tests run beside."""

WORKER = """
import logging, os, pickle, signal, subprocess, sys, time
from braid.runtime.lifeline import Lifeline, give_up

lifeline = Lifeline(pickle.loads(bytes.fromhex(sys.argv[1])))
exec(sys.argv[2])
time.sleep(1000)
"""


@dataclass(eq=False)
class Team:
    role: str = "policy"
    size: int = 2


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lifelines]:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 0\noom_kill 3\n")
    lines = Lifelines("127.0.0.1", KillCount(counter))
    yield lines
    lines.close()


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def _start(workers: list[subprocess.Popen[bytes]], ticket: Ticket, code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WORKER, pickle.dumps(ticket).hex(), code]
    workers.append(subprocess.Popen(command))
    return workers[-1]


def _await(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_killed_worker_is_lost_and_oom_is_reported_only_if_the_kernel_counted_it(
    lines: Lifelines, workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    team = Team()
    _start(workers, lines.ticket(Member(team, 1), None), "os.kill(os.getpid(), signal.SIGKILL)")
    loss = lines.first_loss(LIMIT_S)
    assert loss is not None
    assert (str(loss.member), loss.said, loss.is_oom) == ("policy worker 1 of 2", None, False)
    lines.forget(team)
    assert lines.first_loss() is None

    counter = tmp_path / "memory.events"
    code = f"open({str(counter)!r}, 'w').write('oom_kill 4'); os.kill(os.getpid(), signal.SIGKILL)"
    _start(workers, lines.ticket(Member(team, 0), None), code)
    loss = lines.first_loss(LIMIT_S)
    assert loss is not None
    assert loss.is_oom


def test_a_worker_that_gives_up_is_lost_with_its_reason_while_its_process_lives(
    lines: Lifelines, workers: list[subprocess.Popen[bytes]]
) -> None:
    process = _start(workers, lines.ticket(Member(Team(), 0), None), "give_up('no engine')")
    loss = lines.first_loss(LIMIT_S)
    assert loss is not None
    assert (loss.said, process.poll()) == ("no engine", None)


def test_warnings_of_ranks_are_logged_once_and_everything_is_in_their_logs(
    lines: Lifelines,
    workers: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A message that a rank logs twice is reported twice, whenever the other logs it."""
    team = Team()
    code = """
print("to the terminal", flush=True)
subprocess.run(["echo", "from a child"])
for _ in range(2):
    logging.getLogger("x").warning("little disk left")
logging.getLogger("braid").info("all well")
import warnings
warnings.warn("old way")
logging.getLogger("x").error("rank %d", {rank})
"""
    with caplog.at_level(logging.WARNING):
        for rank in range(2):
            ticket = lines.ticket(Member(team, rank), tmp_path / f"policy-{rank}.log")
            _start(workers, ticket, code.format(rank=rank))
        _await(lambda: "policy worker 1 of 2: rank 1" in caplog.text, "rank 1 was never heard")
        _await(lambda: "policy worker 0 of 2: rank 0" in caplog.text, "rank 0 was never heard")
    said = [record.getMessage() for record in caplog.records]
    assert sum("little disk left" in text for text in said) == 2
    assert sum("old way" in text for text in said) == 1
    assert not any("all well" in text for text in said)
    log = (tmp_path / "policy-1.log").read_text()
    for text in (
        "to the terminal",
        "from a child",
        "WARNING x: little disk left",
        "INFO braid: all well",
        "ERROR x: rank 1",
    ):
        assert text in log


def test_workers_and_what_they_have_started_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    """Including a child that reads nothing and has its own session."""
    code = f"""
import pickle, subprocess, sys, time
from braid.runtime.lifeline import Lifelines, Member
from tests.faults.test_lifeline import Team, WORKER
ticket = Lifelines("127.0.0.1").ticket(Member(Team(), 0), None)
start = "child = subprocess.Popen(['sleep', '100'], start_new_session=True); open({str(tmp_path / "up")!r}, 'w').write(str(child.pid))"
subprocess.run([sys.executable, "-c", WORKER, pickle.dumps(ticket).hex(), start])
"""
    driver = subprocess.Popen([sys.executable, "-c", code])
    try:
        up = tmp_path / "up"
        _await(lambda: up.exists() and up.read_text() != "", "the worker never came up")
        started = psutil.Process(driver.pid).children(recursive=True)
        assert {process.pid for process in started} >= {int(up.read_text())}
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        _, left = psutil.wait_procs(started, LIMIT_S)
        assert not left
    finally:
        driver.kill()
        driver.wait()


def test_peers_without_the_secret_are_ignored(lines: Lifelines) -> None:
    ticket = lines.ticket(Member(Team(), 0), None)
    for said in (b'{"word": "guess"}\n{"failed": "ha"}\n', b"no json\n", b'{"failed": "ha"}\n'):
        with socket.create_connection((ticket.host, ticket.port), LIMIT_S) as connection:
            connection.sendall(said)
            while connection.recv(16):
                pass
    assert lines.first_loss() is None


def test_peers_without_the_secret_are_dropped_and_workers_continue(
    lines: Lifelines, workers: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    team = Team(size=1)
    ticket = lines.ticket(Member(team, 0), None)
    address = (ticket.host, ticket.port)
    said = [
        b'{"word":[]}\n',
        b'{"word":' + b"[" * 100_000,
        b"\n",
        b"\xff\n",
        b"x" * 100_000,
        b"0" * 32 + b"\n",
    ]
    peers = [socket.create_connection(address) for _ in range(200)]
    for i, peer in enumerate(peers):
        with contextlib.suppress(OSError):  # dropped already
            peer.sendall(said[i % len(said)])
    for peer in peers:
        peer.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""
        peer.close()
    with caplog.at_level(logging.WARNING):
        _start(workers, ticket, "logging.warning('still heard')")
        _await(lambda: "still heard" in caplog.text, "the warning")
    assert lines.first_loss() is None


@pytest.mark.parametrize("text", [b"[]", b"[" * 50_000, b'{"level": "x", "text": 1}', b"{" * 70_000])
def test_a_worker_that_sends_garbage_is_lost_and_others_continue(
    lines: Lifelines, workers: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    broken, sound = Team(size=1), Team(size=1)
    ticket = lines.ticket(Member(broken, 0), None)
    with socket.create_connection((ticket.host, ticket.port)) as peer:
        peer.sendall(ticket.word.encode() + b"\n" + text + b"\n")
        loss = lines.first_loss(LIMIT_S)
    assert loss is not None
    assert loss.member.team is broken
    with caplog.at_level(logging.WARNING):
        _start(workers, lines.ticket(Member(sound, 0), None), "logging.warning('still heard')")
        _await(lambda: "still heard" in caplog.text, "the warning")
