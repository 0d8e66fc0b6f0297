"""Random and mutated frames at every listening socket of a run change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
from tests.faults.test_worker_deaths import Unbroken, assert_equal, run_config, weights

from braid.config.load import load_config
from braid.report.reporter import Reporter
from braid.trainer import commands

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

Address = tuple[str, int]

AT_ONCE, PER_CONNECTION = 4, 100
"""A connection gets four frames at a time until the peer drops it. It is not for more than a hundred, since a
socket that is not accepted from for a while has room for 128 connections."""
_FRAMES = [
    b'{"word":[]}\n',
    b'{"level": 30, "text": "x"}\n',
    b"[" * 20_000,
    b"0" * 32 + b"\n",
    b"0" * 32 + b" engine 0\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    struct.pack("!q", 0) + bytes(16),
    *(struct.pack("!I", len(m)) + m for m in (b"[1]", b"null", json.dumps({"kind": "hello", "secret": ""}).encode())),
]  # fmt: skip


def _frame(numbers: random.Random) -> bytes:
    if numbers.random() < 0.5:
        return numbers.randbytes(numbers.randrange(1, 200))
    frame = bytearray(numbers.choice(_FRAMES))
    for _ in range(numbers.randrange(4)):
        frame[numbers.randrange(len(frame))] = numbers.randrange(256)
    return bytes(frame)


def _listening() -> set[Address]:
    """The addresses that this process and all that it has started listen at."""
    addresses: set[Address] = set()
    parent = psutil.Process()
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    addresses.add((connection.laddr.ip, connection.laddr.port))
    return addresses


class _Fuzz:
    """Sends frames to everything that has begun to listen since, from a separate thread."""

    def __init__(self, num_frames: int) -> None:
        self._num_frames, self._others = num_frames, _listening()
        self._sending: dict[Address, Future[int]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def find(self) -> None:
        """Begin with the sockets that are new."""
        for address in _listening() - self._others - self._sending.keys():
            self._sending[address] = asyncio.run_coroutine_threadsafe(
                _send(address, self._num_frames), self._loop
            )

    def finish(self) -> dict[Address, int]:
        """Number of frames that each socket got until it had them all, or was closed."""
        self.find()
        return {address: sending.result() for address, sending in self._sending.items()}

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _send(address: Address, num_frames: int) -> int:
    """Send frames to a socket until it has got them all or is closed. Returns their number."""
    host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address[0], address[0])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    numbers, num_sent, loop = random.Random(0), 0, asyncio.get_running_loop()
    while num_sent < num_frames:
        with socket.socket(family) as peer:
            peer.setblocking(False)
            with contextlib.suppress(ConnectionResetError, BrokenPipeError, TimeoutError):
                async with asyncio.timeout(1.0):  # for peers that do not accept, or read, while they work
                    try:
                        await loop.sock_connect(peer, (host, address[1]))
                    except ConnectionRefusedError:
                        return num_sent
                    for _ in range(PER_CONNECTION // AT_ONCE):
                        frames = [_frame(numbers) for _ in range(AT_ONCE)]
                        await loop.sock_sendall(peer, b"".join(frames))
                        num_sent += AT_ONCE
                        await asyncio.sleep(0)
                        if num_sent == num_frames or _is_dropped(peer):
                            break
    return num_sent


def _is_dropped(peer: socket.socket) -> bool:
    try:
        return not peer.recv(1 << 16)
    except BlockingIOError:
        return False


@pytest.mark.parametrize("num_frames", [2_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_a_run_whose_sockets_are_fuzzed_ends_with_the_same_weights(
    unbroken: Unbroken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_frames: int
) -> None:
    """Each socket gets that many frames."""
    begun: list[str] = []
    sent: dict[Address, int] = {}
    listening: set[Address] = set()
    phase = Reporter.phase

    def phased(reporter: Reporter, verb: str) -> contextlib.AbstractContextManager[None]:
        begun.append(verb)
        if verb != "build":
            fuzz.find()
        if verb == "rollout" and begun.count(verb) == 2:  # a whole round is left for what they have broken
            sent.update(fuzz.finish())
            listening.update(_listening())
        return phase(reporter, verb)

    monkeypatch.setattr(Reporter, "phase", phased)
    sections = {"run": {"max_rounds": 2}, "rollout": {"weight_sync": {"transport": "gloo"}}}
    with contextlib.closing(_Fuzz(num_frames)) as fuzz:
        commands.train(load_config(run_config(tmp_path, **sections)))

    loopback = {address for address in sent if address[0] == "127.0.0.1"}  # Ray's are at all addresses
    assert len(loopback) > 5
    for address in loopback | (listening & sent.keys()):
        assert sent[address] == num_frames, address
    assert_equal(weights(tmp_path), unbroken.weights[1])
