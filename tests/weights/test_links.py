"""Waiting for NCCL, whose peer has failed: for a group that is never made, and a collective that never
completes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.leftovers import LIMIT_S

from braid.errors import EngineError
from braid.weights import links
from braid.weights.links import GroupLink
from braid.weights.wire import Wire

GPU = torch.device("cuda")
DATA = [torch.zeros(8, dtype=torch.uint8)]


class Stuck:
    """A group whose broadcasts never complete, and the handle of such a broadcast."""

    is_aborted = False

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self

    def is_completed(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    """Both ends of a connection: the trainer's, and engine 0's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        yield Wire(ours, "engine 0"), Wire(theirs, "the trainer")


def test_an_engine_that_fails_ends_the_wait_for_its_collective(wires: tuple[Wire, Wire]) -> None:
    (to_engine, to_trainer), group = wires, Stuck()
    link = GroupLink(group, GPU, [to_engine], "receiving weights")
    to_trainer.close("out of memory")
    with pytest.raises(EngineError, match="engine 0 failed while receiving weights: out of memory"):
        link.transfer(DATA, time.monotonic() + LIMIT_S)
    link.close()
    assert group.is_aborted


def test_a_trainer_that_dies_ends_the_wait_whatever_it_sent_before(wires: tuple[Wire, Wire]) -> None:
    (to_engine, to_trainer), group = wires, Stuck()
    link = GroupLink(group, GPU, [to_trainer], "sending weights")
    deadline = time.monotonic() + LIMIT_S
    to_engine.send({"kind": "bucket", "index": 1}, deadline, "sending weights")
    to_engine.close()
    with pytest.raises(EngineError, match="lost the trainer while sending weights"):
        link.transfer(DATA, deadline)
    assert to_trainer.receive("bucket", deadline, "reading on")["index"] == 1


def test_a_hanging_collective_is_abandoned_at_the_deadline(wires: tuple[Wire, Wire]) -> None:
    link = GroupLink(Stuck(), GPU, wires[:1], "receiving weights")
    with pytest.raises(EngineError, match="did not complete in time"):
        link.transfer(DATA, time.monotonic())


class Waiting:
    """A group that waits for its peers in its first collective."""

    never: threading.Event

    class Options:
        _timeout: Any = None

    def __init__(self, *_: Any) -> None: ...

    def allreduce(self, _: Any) -> None:
        self.never.wait()


@pytest.mark.parametrize(
    ("dies", "words"),
    [(True, "engine 0 failed while connecting by NCCL: out"), (False, "cannot create a nccl")],
)
def test_a_group_of_nccl_is_abandoned_if_a_peer_fails_or_time_is_up(
    wires: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch, dies: bool, words: str
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Waiting, raising=False)
    monkeypatch.setattr(Waiting, "never", threading.Event(), raising=False)
    to_engine, to_trainer = wires
    if dies:
        to_trainer.close("out of memory")
    deadline = time.monotonic() + LIMIT_S * dies
    with pytest.raises(EngineError, match=words):
        links._join_group("nccl", dist.HashStore(), 0, 2, LIMIT_S, torch.device("cpu"), [to_engine], deadline)
    Waiting.never.set()
