"""What the two ends of a publication tell each other, beside the weights themselves.

A receiver connects to the sender by its ticket and sends one line: the ticket's secret and its engine's name. Nothing of a peer is parsed
before its secret was compared. Then each version is, from the sender:

    link           how bytes will come, once per set of engines; the receiver answers `ready`
    begin          the version
    bucket         names, types and shapes of the tensors that follow; their bytes go over the link
    fingerprints   of the bucket's tensors
    end            how many tensors there were, and the fingerprint of them all; the receiver answers `done`

`failed` may come instead from either side, with the reason. Messages are JSON: nothing that comes is ever run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

import torch

from braid.errors import EngineError

Transport = Literal["shared_memory", "cuda_ipc", "nccl", "gloo", "files"]
Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
_LONGEST = 2**30
_HELLO_BYTES = 4096
"""Longest first line: all that is read of a peer that does not know the secret."""
_HELLO_S = 5.0
"""Within this a peer must have said it."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """How to receive from a sender. Plain data: it may be pickled, or passed on as JSON (`as_dict`, `Ticket(**d)`).

    `secret` keeps others on the network out. `folder` is that of the transport `files`, which has no address."""

    transport: Transport
    host: str = ""
    port: int = 0
    secret: str = ""
    folder: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a bucket; `dtype` as torch names it, without the module."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Receipt:
    """A version that arrived whole. `fingerprint` is that of all names and tensors, in order."""

    version: int
    num_tensors: int
    num_bytes: int
    fingerprint: str


class Tally:
    """Counts the tensors of a version on either side, for the comparison at its end."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._num_tensors = self._num_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, spec: TensorSpec, fingerprint: str) -> None:
        self._num_tensors += 1
        self._num_bytes += spec.num_bytes
        self._digest.update(json.dumps([spec.name, spec.dtype, spec.shape, fingerprint]).encode())

    def receipt(self) -> Receipt:
        return Receipt(self._version, self._num_tensors, self._num_bytes, self._digest.hexdigest())


class Wire:
    """A connection for messages. Every failure is an EngineError that names the peer and what was being done."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)
        self.peer = peer
        self._socket = connection

    def send(self, message: Message, deadline: float, doing: str) -> None:
        """Raises EngineError when the peer is gone or does not read in time."""
        data = json.dumps(message).encode()
        self._socket.settimeout(_left(deadline))
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError:
            raise self.late(doing) from None
        except OSError as error:
            # Its last words may say why it went.
            self._raise_failure()
            raise self._gone(doing, str(error.strerror or error)) from None

    def receive(self, kind: str, deadline: float, doing: str) -> Message:
        """The next message, of this kind. Raises EngineError when the peer says that it failed, is gone or is late."""
        message = self.receive_any(deadline, doing)
        if message.get("kind") != kind:
            raise EngineError(
                f"{self.peer} said {message.get('kind')!r} where {kind!r} was due while {doing}; both ends of a "
                "publication must be of the same version of braid"
            )
        return message

    def receive_any(self, deadline: float, doing: str) -> Message:
        """The next message of any kind but `failed`."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline, doing))
        if length > _LONGEST:
            raise EngineError(f"{self.peer} sent a message of {length} bytes; it is no end of a publication")
        try:
            message: Message = json.loads(self._read(length, deadline, doing))
        except (ValueError, RecursionError):
            message = {}
        if not isinstance(message, dict) or "kind" not in message:
            raise EngineError(
                f"{self.peer} sent {length} bytes that are no message of a publication while {doing}"
            )
        if message["kind"] == "failed":
            raise EngineError(f"{self.peer} failed while {doing}: {message.get('why')}")
        return message

    def is_readable(self) -> bool:
        """Whether a message waits, or the peer is gone."""
        return bool(readable([self._socket], 0.0))

    def close(self, why: str | None = None) -> None:
        """With `why`, tell the peer first, if it listens."""
        if why is not None:
            with suppress(EngineError):
                self.send({"kind": "failed", "why": why}, time.monotonic() + 1.0, "giving up")
        self._socket.close()

    def _read(self, num_bytes: int, deadline: float, doing: str) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            self._socket.settimeout(_left(deadline))
            try:
                data = self._socket.recv(num_bytes - len(parts))
            except TimeoutError:
                raise self.late(doing) from None
            except OSError as error:
                raise self._gone(doing, str(error.strerror or error)) from None
            if not data:
                raise self._gone(doing, "the connection ended")
            parts += data
        return bytes(parts)

    def _raise_failure(self) -> None:
        """Raises what the peer said last, if that was a failure."""
        soon = time.monotonic() + 0.1
        try:
            while True:
                self.receive_any(soon, "publishing")
        except EngineError as error:
            if "failed while" in str(error):
                raise

    def _gone(self, doing: str, how: str) -> EngineError:
        return EngineError(
            f"{self.peer} is gone while {doing} ({how}): its process ended or was killed; its own log says why"
        )

    def late(self, doing: str) -> EngineError:
        """For who waits for the peer, and has waited long enough."""
        return EngineError(
            f"{self.peer} did not answer in time while {doing}; raise cluster.call_timeout_s if it only needs longer"
        )


def call(ticket: Ticket, engine: str, deadline: float) -> Wire:
    """Connect to the sender of a ticket as `engine`. Raises EngineError when it does not listen."""
    where = f"{ticket.host}:{ticket.port}"
    try:
        connection = socket.create_connection((ticket.host, ticket.port), timeout=_left(deadline))
    except OSError as error:
        raise EngineError(
            f"engine {engine} cannot reach the trainer's publications at {where} ({error.strerror or error}): the trainer "
            "has ended, or its address is not one that this machine can reach"
        ) from None
    wire = Wire(connection, f"the trainer at {where}")
    with suppress(OSError):  # a trainer that is gone is noticed when it is heard
        connection.settimeout(_left(deadline))
        connection.sendall(f"{ticket.secret} {engine}\n".encode())
    return wire


@dataclass(slots=True)
class Caller:
    """A peer that has connected and has not shown yet that it is an engine."""

    connection: socket.socket
    until: float
    said: bytes = b""

    @classmethod
    def accepted(cls, connection: socket.socket) -> Caller:
        """Of a new connection. Reading from it never blocks."""
        connection.setblocking(False)
        return cls(connection, time.monotonic() + _HELLO_S)

    def fileno(self) -> int:
        return self.connection.fileno()

    def hear(self, secret: str) -> tuple[str, Wire] | None:
        """Read what has arrived: the name of an engine with its wire once its line is whole. None before that, and for any other peer,
        whose connection is then closed."""
        try:
            data = self.connection.recv(_HELLO_BYTES - len(self.said))
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        self.said += data or b""
        line, end, rest = self.said.partition(b"\n")
        if not end:
            if data == b"" or len(self.said) >= _HELLO_BYTES or time.monotonic() > self.until:
                self.connection.close()
            return None
        said, _, name = line.partition(b" ")
        if (
            not hmac.compare_digest(said, secret.encode()) or rest
        ):  # an engine says no more before it is spoken to
            self.connection.close()
            return None
        engine = name.decode(errors="replace")
        return engine, Wire(self.connection, f"engine {engine}")


def specs_from(message: Message) -> list[TensorSpec]:
    """Of a `bucket` message."""
    return [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in message["tensors"]]


def specs_message(index: int, specs: Iterable[TensorSpec]) -> Message:
    """A `bucket` message."""
    return {"kind": "bucket", "index": index, "tensors": [[s.name, s.dtype, s.shape] for s in specs]}


def tell(wires: Mapping[str, Wire], message: Message, deadline: float, doing: str) -> None:
    """Send to all."""
    for wire in wires.values():
        wire.send(message, deadline, doing)


def own_end(wires: Iterable[Wire]) -> str:
    """This machine's address on the connections: one that other machines reach, if any of the peers is on another."""
    addresses = [wire._socket.getsockname()[0] for wire in wires]
    return next((a for a in addresses if not a.startswith("127.") and a != "::1"), addresses[0])


def wait_any(wires: Iterable[Wire], seconds: float) -> None:
    """Until one of them has said something or is gone, or the time is over."""
    if sockets := [wire._socket for wire in wires]:
        readable(sockets, seconds)


def readable(sockets: Iterable[Any], seconds: float) -> list[Any]:
    """Those of the sockets with data, a connection or an end to read, waited for so long. Other than select, for any number of
    open files."""
    poll, by_number = select.poll(), {of.fileno(): of for of in sockets}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(seconds * 1000)]


def _left(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())
