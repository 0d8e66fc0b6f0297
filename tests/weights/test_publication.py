"""Weights arrive as sent, or the receivers get an error with the reason."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
from tests.leftovers import LIMIT_S
from torch import Tensor

from braid.errors import EngineError
from braid.weights.links import Link
from braid.weights.receiver import Receiver, open_receiver
from braid.weights.sender import LinkedSender, join_send, open_sender
from braid.weights.sending import Sender, SendOptions
from braid.weights.wire import Receipt, Ticket

pytestmark = pytest.mark.slow

BUCKET_BYTES = 2**20
LINKED = ("shared_memory", "gloo")


def _weights(version: int) -> dict[str, Tensor]:
    """Tensors of every sort: large, larger than a bucket, small, of no element, of no dimension, not
    contiguous, of odd sizes."""
    generator = torch.Generator().manual_seed(version)
    grid = torch.randn(300, 701, generator=generator)
    return {
        "embed": torch.randn(900, 401, generator=generator),
        "norm": torch.randn(64, generator=generator),
        "grid": grid,
        "turned": grid.t(),
        "half": torch.randn(333, 333, generator=generator).to(torch.bfloat16),
        "odd": torch.randn(3, 5, generator=generator).to(torch.float16)[:, 1:],
        "counts": torch.arange(100_001) + version,
        "flags": torch.rand(40_001, generator=generator) < 0.5,
        "nothing": torch.zeros(0, 3),
        "scale": torch.tensor(1.5 + version),
        "twin": grid + 1.0,
    }


def _options(transport: str, folder: Path | None = None, **other: Any) -> SendOptions:
    options = SendOptions(
        transport=transport,  # pyright: ignore[reportArgumentType]
        bucket_bytes=BUCKET_BYTES,
        timeout_s=LIMIT_S,
        folder=None if folder is None else str(folder),
    )
    return replace(options, **other)


def _take(receiver: Receiver, version: int) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in receiver.receive(version)}


def _take_into(receiver: Receiver, version: int) -> dict[str, Tensor]:
    targets = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in _weights(version).items()
    }
    receiver.receive_into(version, targets)
    return targets


Take = Callable[[Receiver, int], dict[str, Tensor]]


def _start(
    ticket: Ticket, engine: str, versions: range, take: Take = _take
) -> Future[list[dict[str, Tensor]]]:
    """An engine in a separate thread that receives some versions."""

    def run() -> list[dict[str, Tensor]]:
        receiver = open_receiver(
            Ticket(**json.loads(json.dumps(ticket.as_dict()))), engine=engine, timeout_s=LIMIT_S
        )
        try:
            return [take(receiver, version) for version in versions]
        finally:
            receiver.close()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def _assert_equal(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(mine) == list(other)
    for name, tensor in other.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


@pytest.fixture
def make_sender() -> Iterator[Callable[..., Sender]]:
    made: list[Sender] = []

    def make(engines: tuple[str, ...], options: SendOptions) -> Sender:
        made.append(open_sender(engines, options))
        return made[-1]

    yield make
    for sender in made:
        sender.close()


@pytest.fixture
def make_receiver() -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def make(ticket: Ticket, engine: str = "a", timeout_s: float = LIMIT_S) -> Receiver:
        made.append(open_receiver(ticket, engine=engine, timeout_s=timeout_s))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


MakeReceiver = Callable[..., Receiver]
MakeSender = Callable[[tuple[str, ...], SendOptions], Sender]


@pytest.mark.parametrize("transport", LINKED)
def test_every_engine_gets_the_weights_of_each_version(transport: str, make_sender: MakeSender) -> None:
    sender = make_sender(("a", "b"), _options(transport))
    engines = [
        _start(sender.ticket, name, range(3), take) for name, take in (("a", _take), ("b", _take_into))
    ]
    receipts = [sender.send(version, _weights(version).items()) for version in range(3)]
    for engine in engines:
        for version, taken in enumerate(engine.result(timeout=LIMIT_S)):
            _assert_equal(taken, _weights(version))
    assert len({receipt.fingerprint for receipt in receipts}) == 3
    assert receipts[0].num_bytes == sum(t.nbytes for t in _weights(0).values())


def test_a_folder_holds_the_weights_of_the_last_versions(
    tmp_path: Path, make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "old.safetensors").write_text("")
    sender = make_sender((), _options("files", tmp_path / "out", beside=str(model)))
    receiver = make_receiver(sender.ticket, "a", 5.0)
    for version in range(3):
        sender.send(version, _weights(version).items())
        _assert_equal(_take(receiver, version), _weights(version))
        _assert_equal(_take_into(receiver, version), _weights(version))
    newest = tmp_path / "out" / "version_000002"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["version_000001", "version_000002"]
    assert (newest / "config.json").exists()
    assert not (newest / "old.safetensors").exists()
    places = json.loads((newest / "model.safetensors.index.json").read_text())["weight_map"]
    assert places.keys() == _weights(0).keys()
    assert {file.name for file in newest.glob("*.safetensors")} == set(places.values())


def test_weights_are_sent_in_the_requested_type(make_sender: MakeSender) -> None:
    sender = make_sender(("a",), _options("shared_memory", dtype=torch.bfloat16))
    engine = _start(sender.ticket, "a", range(1))
    sender.send(0, _weights(0).items())
    (taken,) = engine.result(timeout=LIMIT_S)
    for name, tensor in _weights(0).items():
        _assert_equal(
            {name: taken[name]}, {name: tensor.bfloat16() if tensor.is_floating_point() else tensor}
        )


def test_weights_are_converted_to_the_type_of_their_target(make_sender: MakeSender) -> None:
    sender = make_sender(("a",), _options("shared_memory"))
    weights = {name: tensor for name, tensor in _weights(0).items() if tensor.is_floating_point()}
    targets = {
        name: torch.zeros(tensor.shape, dtype=torch.float64, requires_grad=True)
        for name, tensor in weights.items()
    }

    def take(receiver: Receiver, version: int) -> dict[str, Tensor]:
        receiver.receive_into(version, targets)
        return {name: tensor.detach() for name, tensor in targets.items()}

    engine = _start(sender.ticket, "a", range(1), take)
    sender.send(0, weights.items())
    _assert_equal(
        engine.result(timeout=LIMIT_S)[0], {name: tensor.double() for name, tensor in weights.items()}
    )


def test_tensors_that_an_engine_keeps_stay_as_they_are(make_sender: MakeSender) -> None:
    sender = make_sender(("a",), _options("shared_memory"))
    engine = _start(sender.ticket, "a", range(4), lambda receiver, version: dict(receiver.receive(version)))
    for version in range(4):
        sender.send(version, _weights(version).items())
    for version, taken in enumerate(engine.result(timeout=LIMIT_S)):
        _assert_equal(taken, _weights(version))


class FaultyLink:
    """A link that damages the data it transfers."""

    def __init__(self, link: Link, fault: str, before: Tensor) -> None:
        self._link, self._fault, self._before, self._number = link, fault, before, 0
        self.device = link.device

    def transfer(self, parts: Sequence[Tensor], deadline: float) -> None:
        self._number += 1
        parts = [part.clone() for part in parts]
        largest = max(parts, key=len)
        if self._fault == "bit" and self._number == 2:
            largest[len(largest) // 2] ^= 4
        elif self._fault == "truncated" and self._number == 1:
            largest[len(largest) * 3 // 4 :] = 0
        elif self._fault == "old" and self._number == 1:
            largest[:] = self._before
        elif self._fault == "swapped":
            parts.reverse()
        self._link.transfer(parts, deadline)

    def close(self) -> None:
        self._link.close()


@pytest.mark.parametrize("transport", LINKED)
@pytest.mark.parametrize("fault", ["bit", "truncated", "old"])
@pytest.mark.parametrize("take", [_take, _take_into])
def test_damage_in_transit_is_detected_and_the_next_version_arrives(
    transport: str, fault: str, take: Take, make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    sender = make_sender(("a",), _options(transport))
    assert isinstance(sender, LinkedSender)
    receiver = make_receiver(sender.ticket, "a", 20.0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sender.send, 0, _weights(0).items())
        take(receiver, 0)
        first.result(timeout=LIMIT_S)
        assert sender._link is not None
        sender._link = FaultyLink(sender._link, fault, _weights(0)["embed"].view(-1).view(torch.uint8))
        sent = pool.submit(sender.send, 1, _weights(1).items())
        with pytest.raises(
            EngineError, match=rf"bucket \d.*differ from what the trainer sent by {transport} to engine a"
        ):
            take(receiver, 1)
        with pytest.raises(EngineError, match=r"engine a failed.*bucket") as error:
            sent.result(timeout=LIMIT_S)
        assert f"syncing version 1 by {transport} failed" in str(error.value)
        pool.submit(sender.send, 2, _weights(2).items())
        _assert_equal(take(receiver, 2), _weights(2))


def test_two_tensors_that_were_swapped_are_both_named(
    make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    sender = make_sender(("a",), _options("shared_memory"))
    assert isinstance(sender, LinkedSender)
    receiver = make_receiver(sender.ticket, "a", 20.0)
    first, second = torch.full((16,), 1.0), torch.full((16,), 2.0)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, 0, {"first": first, "second": second}.items())
        list(receiver.receive(0))
        sent.result(timeout=LIMIT_S)
        assert sender._link is not None
        sender._link = FaultyLink(sender._link, "swapped", first)
        pool.submit(sender.send, 1, {"first": first, "second": second}.items())
        with pytest.raises(EngineError, match=r"2 of 2 tensors in bucket 0 of the weights \(first, second\)"):
            list(receiver.receive(1))


@pytest.mark.parametrize("fault", ["bit", "truncated", "missing", "other sender"])
def test_damaged_files_are_detected(
    fault: str, tmp_path: Path, make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    sender = make_sender((), _options("files", tmp_path))
    sender.send(0, _weights(0).items())
    file = tmp_path / "version_000000" / "bucket_00001.safetensors"
    ticket, message = sender.ticket, "bucket 1 of the weights|cannot read"
    if fault == "bit":
        data = bytearray(file.read_bytes())
        data[-1000] ^= 1
        file.write_bytes(data)
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif fault == "missing":
        file.unlink()
    else:
        ticket, message = make_sender((), _options("files", tmp_path)).ticket, "did not write "
    with pytest.raises(EngineError, match=message):
        _take(make_receiver(ticket, "a", 0.3), 0)


def test_an_unexpected_version_is_refused(make_sender: MakeSender) -> None:
    sender = make_sender(("a",), _options("shared_memory"))
    engine = _start(sender.ticket, "a", range(7, 8))
    with pytest.raises(
        EngineError, match="expects version 7 of the weights, but the trainer sends version 6"
    ):
        sender.send(6, _weights(6).items())
    with pytest.raises(EngineError, match="one of them missed a round"):
        engine.result(timeout=LIMIT_S)


def test_different_models_on_the_two_sides_are_reported(
    make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    sender = make_sender(("a",), _options("shared_memory"))
    receiver = make_receiver(sender.ticket, "a", 20.0)
    sent = {"x": torch.zeros(3), "y": torch.zeros(2)}
    cases = (
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, r"sends y of shape \(2,\).*of shape \(4,\)"),
        ({"x": torch.zeros(3)}, "sends y.*unknown"),
        (
            {"x": torch.zeros(3), "y": torch.zeros(2), "z": torch.zeros(2)},
            "lacks 1 of the engine's tensors.* z",
        ),
    )
    with ThreadPoolExecutor(1) as pool:
        for version, (targets, message) in enumerate(cases):
            pool.submit(sender.send, version, sent.items())
            with pytest.raises(EngineError, match=message):
                receiver.receive_into(version, targets)


def test_waiting_ends_at_the_deadline_and_names_missing_engines(
    make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    silent = make_sender(("a",), _options("shared_memory", timeout_s=2.0))
    with pytest.raises(EngineError, match="did not answer in time while requesting version 0"):
        list(make_receiver(silent.ticket, "a", 2.0).receive(0))
    sender = make_sender(("a", "b"), _options("shared_memory", timeout_s=2.0))
    make_receiver(sender.ticket, "a", LIMIT_S)  # connects at once
    with pytest.raises(EngineError, match="engine b did not connect for version 0"):
        sender.send(0, _weights(0).items())


def test_an_engine_that_stops_reading_is_named_at_the_deadline(make_sender: MakeSender) -> None:
    sender = make_sender(("a",), _options("shared_memory", timeout_s=5.0))
    go_on = threading.Event()

    def take(receiver: Receiver, version: int) -> dict[str, Tensor]:
        for _ in receiver.receive(version):
            go_on.wait(LIMIT_S)
        return {}

    engine = _start(sender.ticket, "a", range(1), take)
    try:
        with pytest.raises(EngineError, match="engine a did not answer in time while receiving"):
            sender.send(0, {str(i): torch.randn(2**19) for i in range(8)}.items())
    finally:
        go_on.set()
    with pytest.raises(EngineError, match="the trainer"):
        engine.result(timeout=LIMIT_S)


def test_an_engine_that_fails_is_named_while_another_one_hangs(make_sender: MakeSender) -> None:
    sender = make_sender(("a", "b"), _options("shared_memory"))
    go_on = threading.Event()

    def hang(receiver: Receiver, version: int) -> dict[str, Tensor]:
        for _ in receiver.receive(version):
            go_on.wait(LIMIT_S)
        return {}

    def fail(receiver: Receiver, version: int) -> dict[str, Tensor]:
        return dict([next(receiver.receive(version))])

    hanging, failing = _start(sender.ticket, "a", range(1), hang), _start(sender.ticket, "b", range(1), fail)
    try:
        with pytest.raises(
            EngineError, match="failed: engine b failed while receiving weights: the engine did not load"
        ):
            sender.send(0, {str(i): torch.randn(2**19) for i in range(8)}.items())
        failing.result(timeout=LIMIT_S)
    finally:
        go_on.set()
    with pytest.raises(EngineError, match="the trainer"):
        hanging.result(timeout=LIMIT_S)


def test_weights_are_read_to_their_end_when_a_sync_fails(make_sender: MakeSender) -> None:
    sender = make_sender(("a",), _options("shared_memory", timeout_s=0.1))
    for version, with_sender in enumerate((sender, None)):
        rest = iter(_weights(0).items())
        if with_sender is None:
            assert join_send(None, version, rest) is None
        else:
            with pytest.raises(EngineError):
                join_send(with_sender, version, rest)
        assert next(rest, None) is None


@pytest.mark.parametrize("existing", ["replace", "refuse"])
def test_a_second_engine_of_a_name_replaces_the_first_or_is_refused(
    existing: Literal["replace", "refuse"], make_sender: MakeSender, make_receiver: MakeReceiver
) -> None:
    sender = make_sender(("a",), _options("shared_memory", existing=existing))
    first, second = (make_receiver(sender.ticket, "a", LIMIT_S) for _ in range(2))
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(sender.send, 0, _weights(0).items())
        refused, served = (second, first) if existing == "refuse" else (first, second)
        taken = pool.submit(_take, served, 0)
        with pytest.raises(EngineError, match=r"already connected|replaced by another engine"):
            _take(refused, 0)
        _assert_equal(taken.result(timeout=LIMIT_S), _weights(0))
        assert isinstance(sent.result(timeout=LIMIT_S), Receipt)


def test_peers_without_the_secret_are_rejected(make_sender: MakeSender, make_receiver: MakeReceiver) -> None:
    sender = make_sender(("a",), _options("shared_memory"))
    ticket = sender.ticket
    stranger = make_receiver(replace(ticket, secret="guess"), "a", LIMIT_S)
    other = make_receiver(ticket, "z", LIMIT_S)
    frames = (b"[1]", b"null", b"[" * 4000, b"\xff", b'{"kind": "hello"}')
    noises = [struct.pack("!I", len(f)) + f for f in frames]
    noises += [b"", b"x", b"GET / HTTP/1.1\r\n\r\n", b"\n", b"x" * 5000, f"{ticket.secret}".encode()]
    with contextlib.ExitStack() as stack:
        for noise in noises:
            peer = stack.enter_context(socket.create_connection((ticket.host, ticket.port)))
            peer.sendall(noise)
        engine = _start(ticket, "a", range(1))
        sender.send(0, _weights(0).items())
    _assert_equal(engine.result(timeout=LIMIT_S)[0], _weights(0))
    with pytest.raises(EngineError, match="lost the trainer"):
        list(stranger.receive(0))
    with pytest.raises(EngineError, match=r"unknown engine z; this sender serves a"):
        list(other.receive(0))


@pytest.mark.parametrize("text", [b"[1]", b"null", b"[" * 50_000, b"\xff", b"{}"])
def test_an_engine_that_sends_garbage_fails_the_weight_sync_and_is_named(
    make_sender: MakeSender, text: bytes
) -> None:
    sender = make_sender(("a",), _options("shared_memory"))
    ticket = sender.ticket
    with socket.create_connection((ticket.host, ticket.port)) as engine, ThreadPoolExecutor(1) as pool:
        engine.sendall(f"{ticket.secret} a\n".encode())
        sent = pool.submit(sender.send, 0, _weights(0).items())
        engine.recv(1)
        engine.sendall(struct.pack("!I", len(text)) + text)
        with pytest.raises(EngineError, match=r"engine a sent \d+ bytes that are not a weight sync message"):
            sent.result(timeout=LIMIT_S)


@pytest.mark.parametrize("transport", LINKED)
def test_on_one_machine_a_sender_listens_only_on_loopback(transport: str, make_sender: MakeSender) -> None:
    sender = make_sender(("a",), _options(transport, host="127.0.0.1"))
    engine = _start(sender.ticket, "a", range(1))
    sender.send(0, _weights(0).items())
    engine.result(timeout=30)
    listening = [
        c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN
    ]
    assert [ip for ip in listening if ip != "127.0.0.1"] == []


def test_a_trainer_that_has_exited_is_named(make_sender: MakeSender, make_receiver: MakeReceiver) -> None:
    sender = make_sender(("a",), _options("shared_memory"))
    ticket = sender.ticket
    sender.close()
    with pytest.raises(EngineError, match=f"cannot connect to the trainer at 127.0.0.1:{ticket.port}"):
        make_receiver(ticket, "a", 1.0)


def _start_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs `code`, and can be killed."""
    head = (
        "import json, os, signal, sys, torch\n"
        "from braid.weights.receiver import open_receiver\n"
        "from braid.weights.sender import open_sender\n"
        "from braid.weights.sending import SendOptions\n"
        "from braid.weights.wire import Ticket\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), *arguments], stdout=subprocess.PIPE, text=True
    )


def _large(number: int) -> Iterator[tuple[str, Tensor]]:
    return ((f"w{i}", torch.zeros(2**19)) for i in range(number))


@pytest.mark.parametrize("transport", LINKED)
def test_an_engine_killed_during_a_sync_is_named(transport: str, make_sender: MakeSender) -> None:
    sender = make_sender(("a",), _options(transport))
    code = """
        receiver = open_receiver(Ticket(**json.loads(sys.argv[1])), engine="a", timeout_s=300.0)
        for version in range(2):
            for _ in receiver.receive(version):
                pass
    """
    with _start_process(code, json.dumps(sender.ticket.as_dict())) as process:
        sender.send(0, _large(2))

        def weights() -> Iterator[tuple[str, Tensor]]:
            for number, pair in enumerate(_large(40)):
                if number == 5:
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()
                yield pair

        with pytest.raises(EngineError, match="lost engine a while receiving"):
            sender.send(1, weights())


def test_a_trainer_killed_during_a_sync_is_named(make_receiver: MakeReceiver) -> None:
    code = """
        sender = open_sender(("a",), SendOptions("shared_memory", 2**20, 60.0))
        print(json.dumps(sender.ticket.as_dict()), flush=True)
        sender.send(0, [("w", torch.zeros(2**19))])

        def weights():
            for number in range(40):
                yield f"w{number}", torch.zeros(2**19)
                if number == 5:
                    os.kill(os.getpid(), signal.SIGKILL)

        sender.send(1, weights())
    """
    with _start_process(code) as process:
        assert process.stdout is not None
        receiver = make_receiver(Ticket(**json.loads(process.stdout.readline())), "a", 60.0)
        list(receiver.receive(0))
        with pytest.raises(EngineError, match=r"lost the trainer at .* while sending weights"):
            list(receiver.receive(1))
