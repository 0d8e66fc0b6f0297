"""Random and mutated frames at every listening socket of a run change nothing."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
from pathlib import Path

import psutil
import pytest
import torch

from braid.config.load import load_config
from braid.controller import commands
from braid.report.reporter import Reporter

from .test_worker_deaths import _config, _weights

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

NUM_FRAMES = 10_000
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


def _listening() -> set[tuple[str, int]]:
    """The addresses that this process and all that it has started listen at."""
    found: set[tuple[str, int]] = set()
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return found


class _Fuzz(threading.Thread):
    """Sends frames to whatever listens, in turn, until enough have been sent."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._others = _listening()
        self.num_sent, self.addresses = 0, set[tuple[str, int]]()

    def run(self) -> None:
        numbers = random.Random(0)
        while self.num_sent < NUM_FRAMES:
            self.addresses |= (found := _listening() - self._others)
            busy: set[tuple[str, int]] = set()
            for address in sorted(found) * 50:
                if address in busy:
                    continue
                host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address[0], address[0])
                try:
                    with socket.create_connection((host, address[1]), 0.2) as peer:
                        peer.sendall(_frame(numbers))
                        self.num_sent += 1
                except TimeoutError:  # connections wait to be accepted
                    busy.add(address)
                except OSError:  # it drops us
                    continue


def test_a_run_whose_sockets_are_fuzzed_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {
        "run": {"max_rounds": 2},
        "rollout": {"publish": {"transport": "gloo"}},
        "algorithm": {"advantage": "grpo", "kl_coef": 0.0},
        "cluster": {"placement": {"policy": "0-1", "rollout": "2"}},
    }
    commands.train(load_config(_config(tmp_path / "quiet", **sections)))

    fuzz, phase, saves = _Fuzz(), Reporter.phase, []

    def phased(reporter: Reporter, verb: str) -> contextlib.AbstractContextManager[None]:
        if verb == "collect" and not fuzz.ident:
            fuzz.start()
        if verb == "save":
            saves.append(verb)
            if len(saves) == 2:
                fuzz.join()
        return phase(reporter, verb)

    monkeypatch.setattr(Reporter, "phase", phased)
    commands.train(load_config(_config(tmp_path / "fuzzed", **sections)))

    assert fuzz.num_sent >= NUM_FRAMES
    assert any(ip == "127.0.0.1" for ip, _ in fuzz.addresses)
    quiet, fuzzed = _weights(tmp_path / "quiet"), _weights(tmp_path / "fuzzed")
    assert fuzzed.keys() == quiet.keys()
    for name, tensor in quiet.items():
        assert torch.equal(fuzzed[name], tensor), name
