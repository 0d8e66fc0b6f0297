"""What holds for each child process, whatever it serves."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from tests.leftovers import LIMIT_S

from braid.processes import Channel, Child, end
from braid.rollout.engines.child import LoggedProcess

MODULE = "tests.processes.served"


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(MODULE, "one", "two")
    yield child
    child.kill()


def ask(child: Child, request: str) -> str:
    child.channel.send(request.encode())
    return child.channel.receive(time.monotonic() + LIMIT_S).decode()


def test_messages_of_any_size_are_answered_in_threads_and_on_event_loops(child: Child) -> None:
    assert ask(child, "arguments") == "one,two"
    assert ask(child, "echo:") == ""
    assert len(asyncio.run(child.channel.ask(b"long:3000000"))) == 3000000
    child.channel.send(b"long:9000000")
    assert len(child.channel.receive(time.monotonic() + LIMIT_S)) == 9000000
    child.channel.send(b"long:101")
    with pytest.raises(OSError, match="101 bytes, above 100"):
        child.channel.receive(longest=100)


def test_a_message_that_is_late_is_a_timeout(child: Child) -> None:
    assert ask(child, "echo:up") == "up"
    child.channel.send(b"hang")
    with pytest.raises(TimeoutError):
        child.channel.receive(time.monotonic() + 0.05)
    assert child.end(0.0) == "was killed by SIGKILL (Killed)"


@pytest.mark.parametrize("waits_in", ["thread", "loop"])
def test_a_death_is_noticed_while_another_process_holds_the_connection(child: Child, waits_in: str) -> None:
    other = psutil.Process(int(ask(child, "start")))
    with pytest.raises(EOFError):
        asyncio.run(child.channel.ask(b"die")) if waits_in == "loop" else ask(child, "die")
    assert child.end(LIMIT_S) == "exited with code 3"
    other.kill()


def test_killing_a_process_ends_a_thread_that_waits_for_it_and_all_that_it_has_started(child: Child) -> None:
    other = psutil.Process(int(ask(child, "start")))
    child.channel.send(b"hang")
    failures: list[type[Exception]] = []

    def wait() -> None:
        try:
            child.channel.receive()
        except Exception as error:
            failures.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    child.kill()
    child.kill()
    waiting.join(LIMIT_S)
    assert not child.is_alive
    assert failures[0] in (EOFError, OSError)
    with suppress(psutil.NoSuchProcess):
        other.wait(LIMIT_S)


def test_an_answer_to_a_parent_that_is_gone_is_no_error_so_that_the_child_ends_what_it_has_started() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.close()
    with pytest.raises(OSError, match="Broken pipe"):
        channel.send(b"answer")
    channel.reply(b"answer")
    assert list(channel.messages()) == []


@pytest.mark.slow
@pytest.mark.parametrize("request_", ["echo:idle", "hang"])
def test_a_process_and_all_that_it_has_started_end_with_their_parent(request_: str) -> None:
    code = (
        "import time; from braid.processes import Child\n"
        f"child = Child({MODULE!r})\n"
        "child.channel.send(b'start')\n"
        "print(child.process.pid, child.channel.receive().decode(), flush=True)\n"
        f"child.channel.send({request_.encode()!r})\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        started = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert not psutil.wait_procs(started, timeout=LIMIT_S)[1]


def test_a_message_that_an_interrupt_cuts_off_ends_the_connection() -> None:
    """Its rest was read as the next message."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall((16).to_bytes(8) + b"12345678")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            channel.receive()
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.sendall((1).to_bytes(8) + b"12345678")
    with pytest.raises(EOFError):
        channel.receive()
    theirs.close()


def test_the_number_of_a_process_that_was_reaped_may_be_that_of_another_which_is_not_killed() -> None:
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, process_group=0)
    reaped = subprocess.Popen(["true"])
    reaped.wait()
    reaped.pid = other.pid
    end(reaped)
    other.communicate(b"\n")
    assert other.returncode == 0


def test_looking_whether_a_process_runs_does_not_free_its_number(child: Child) -> None:
    with pytest.raises(EOFError):
        ask(child, "die")
    deadline = time.monotonic() + LIMIT_S
    while child.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.is_alive
    assert psutil.Process(child.process.pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_can_be_ended_by_one_with_more_than_a_thousand_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        child = Child(MODULE)
        assert ask(child, "echo:up") == "up"
        assert child.end(LIMIT_S) == "was killed by SIGKILL (Killed)"  # by itself


def test_an_engine_that_has_ended_keeps_no_descriptor(tmp_path: Path) -> None:
    """Nor its number, by which another process was killed when the engine's object was freed."""
    before = len(os.listdir("/proc/self/fd"))
    process, channel = LoggedProcess.of_module(MODULE, log=tmp_path / "log.txt", environment={}, folder=None)
    process.end()
    assert not process.is_running
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match=r"."):
        channel.send(b"echo:up")


@pytest.fixture
def no_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the filter of a container of 2019."""

    def forbidden(pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", forbidden)


def test_a_process_runs_where_pidfd_open_is_forbidden(no_handles: None) -> None:
    child = Child(MODULE)
    assert ask(child, "echo:up") == "up"
    with pytest.raises(EOFError):
        ask(child, "die")
    assert child.end(LIMIT_S) == "exited with code 3"


@pytest.mark.slow
def test_a_process_ends_with_its_parent_where_pidfd_open_is_forbidden() -> None:
    child = (
        "import errno, os, time\n"
        "def forbidden(pid): raise PermissionError(errno.EPERM, 'Operation not permitted')\n"
        "os.pidfd_open = forbidden\n"
        "from braid.processes import end_with\n"
        "end_with(os.getppid())\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(1000)\n"
    )
    code = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        started = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert not psutil.wait_procs([started], timeout=LIMIT_S)[1]
