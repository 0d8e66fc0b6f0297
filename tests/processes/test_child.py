"""What holds for each child process, whatever it serves."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from tests.leftovers import LIMIT_S

from braid.processes import Channel, Child

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
