"""The control messages between sender and receiver; the weights themselves go over a link.

A receiver connects to the address in the sender's ticket and sends one line: the ticket's secret and its
engine's name. A peer's messages are not parsed before its secret has been verified. For each version the
sender then sends:

    link      parameters of the link, once per set of engines; the receiver answers `ready`
    begin     the version
    bucket    names, dtypes, shapes and fingerprints of the tensors that follow; their bytes go over the link
    end       number of tensors and fingerprint of the whole version; the receiver answers `done`

Either side may send `failed`, with the reason, instead. Messages are JSON: received data is never executed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, TypeVar

import torch

from braid.errors import EngineError
from braid.json_text import parse_json

Transport = Literal["shared_memory", "cuda_ipc", "nccl", "gloo", "files"]
Message = dict[str, Any]
T = TypeVar("T", bound="Any")

_LENGTH = struct.Struct("!I")
_LONGEST = 2**30
_HELLO_BYTES = 4096
"""Length limit of the first line: the most that is read from a peer that does not know the secret."""
_HELLO_S, _MAX_STRANGERS = 5.0, 128
"""Seconds within which a peer must have sent its first line, and the most peers that have not sent it."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Address and credentials of a sender. Plain data: can be pickled, or passed as JSON (`as_dict`,
    `Ticket(**d)`).

    `secret` keeps out other peers on the network. `folder` is for the transport `files`, which has no
    address."""

    transport: Transport
    host: str = ""
    port: int = 0
    secret: str = ""
    folder: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The ticket as a JSON-serialisable dict."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a bucket; `dtype` is torch's name without the module, such as "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize


class Receipt:
    """Count and fingerprint of a version's tensors, in order: kept on both sides and compared at its end."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.num_tensors = self.num_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, spec: TensorSpec, fingerprint: str) -> None:
        self.num_tensors += 1
        self.num_bytes += spec.num_bytes
        self._digest.update(json.dumps([spec.name, spec.dtype, spec.shape, fingerprint]).encode())

    @property
    def fingerprint(self) -> str:
        return self._digest.hexdigest()


class Wire:
    """A message connection. Every failure is an EngineError that names the peer and the current operation
    (`doing`). Deadlines are times of time.monotonic()."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._socket = connection
        self._ahead: deque[Message] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, deadline: float, doing: str) -> None:
        """Send a message. Raises EngineError if the peer is gone or does not read in time."""
        data = json.dumps(message).encode()
        self._socket.settimeout(_left(deadline))
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError:
            raise self.late(doing) from None
        except OSError as error:
            self.look_ahead(deadline, doing)  # the peer may have given its reason
            raise self._gone(doing, str(error.strerror or error)) from None

    def receive(self, kind: str, deadline: float, doing: str) -> Message:
        """Receive the next message, which must be of `kind`. Raises EngineError if it is not, or if the peer
        reports a failure, is gone or times out."""
        message = self.receive_any(deadline, doing)
        if message["kind"] != kind:
            raise EngineError(
                f"{self.peer} sent {message['kind']!r} instead of {kind!r} while {doing}; both ends of a "
                "weight sync must run the same version of braid"
            )
        return message

    def receive_any(self, deadline: float, doing: str) -> Message:
        """Receive the next message of any kind; `failed` raises EngineError."""
        return self._ahead.popleft() if self._ahead else self._next(deadline, doing)

    def look_ahead(self, deadline: float, doing: str) -> None:
        """Read the messages that have arrived, for later. Raises EngineError if the peer has failed or is
        gone, however many messages came before."""
        while readable([self], 0.0):
            self._ahead.append(self._next(deadline, doing))

    def is_readable(self) -> bool:
        """Whether a message is waiting, or the peer is gone."""
        return bool(self._ahead or readable([self], 0.0))

    def close(self, why: str | None = None) -> None:
        """Close the connection. With `why`, first try to send the peer a `failed` message."""
        if why is not None:
            with suppress(EngineError):
                self.send({"kind": "failed", "why": why}, time.monotonic() + 1.0, "giving up")
        self._socket.close()

    def late(self, doing: str) -> EngineError:
        """The error for a peer that did not answer in time."""
        return EngineError(
            f"{self.peer} did not answer in time while {doing}; raise cluster.call_timeout_s if it needs "
            "more time"
        )

    def _next(self, deadline: float, doing: str) -> Message:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline, doing))
        if length > _LONGEST:
            raise EngineError(
                f"{self.peer} sent a message of {length} bytes, which is not part of a weight sync"
            )
        try:
            message: Message = parse_json(self._read(length, deadline, doing))
        except ValueError:
            message = {}
        if not isinstance(message, dict) or "kind" not in message:
            raise EngineError(
                f"{self.peer} sent {length} bytes that are not a weight sync message while {doing}"
            )
        if message["kind"] == "failed":
            raise EngineError(f"{self.peer} failed while {doing}: {message.get('why')}")
        return message

    def _read(self, num_bytes: int, deadline: float, doing: str) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            self._socket.settimeout(_left(deadline))
            try:
                part = self._socket.recv(min(num_bytes - len(data), 2**20))
            except TimeoutError:
                raise self.late(doing) from None
            except OSError as error:
                raise self._gone(doing, str(error.strerror or error)) from None
            if not part:
                raise self._gone(doing, "the connection was closed")
            data += part
        return bytes(data)

    def _gone(self, doing: str, how: str) -> EngineError:
        return EngineError(
            f"lost {self.peer} while {doing} ({how}): its process exited or was killed; see its log"
        )


def call(ticket: Ticket, engine: str, deadline: float) -> Wire:
    """Connect to the ticket's sender as `engine`. Raises EngineError if it cannot be reached."""
    where = f"{ticket.host}:{ticket.port}"
    try:
        connection = socket.create_connection((ticket.host, ticket.port), timeout=_left(deadline))
    except OSError as error:
        raise EngineError(
            f"engine {engine} cannot connect to the trainer at {where} ({error.strerror or error}): the "
            "trainer has exited, or this machine cannot reach its address"
        ) from None
    wire = Wire(connection, f"the trainer at {where}")
    with suppress(OSError):  # a trainer that is gone is detected on the first receive
        connection.settimeout(_left(deadline))
        connection.sendall(f"{ticket.secret} {engine}\n".encode())
    return wire


class Listener:
    """Accepts engines that know its secret. Other peers are dropped: those whose first line is wrong, too
    long or late, and the oldest of too many."""

    def __init__(self, host: str) -> None:
        self.secret = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=256)
        self._socket.settimeout(0.0)
        self.port: int = self._socket.getsockname()[1]
        self._strangers: list[_Stranger] = []

    def accept(self, wait_s: float) -> list[tuple[str, Wire]]:
        """The engines that have connected, by name, after waiting at most `wait_s` for the first."""
        engines: list[tuple[str, Wire]] = []
        until = time.monotonic() + wait_s
        while True:
            ready = readable([self._socket, *self._strangers], max(0.0, until - time.monotonic()))
            if self._socket in ready:
                with suppress(OSError):  # the peer has disconnected again
                    self._strangers.append(_Stranger(self._socket.accept()[0]))
            engines += [engine for each in self._strangers if (engine := each.hear(self.secret)) is not None]
            for old in self._strangers[:-_MAX_STRANGERS]:
                old.close()
            self._strangers = [each for each in self._strangers if each.fileno() >= 0]
            if engines:
                until = 0.0
            if not ready and time.monotonic() >= until:
                return engines

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for stranger in self._strangers:
            stranger.close()
        self._socket.close()


class _Stranger:
    """A connected peer that has not yet authenticated as an engine."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._until, self._said = connection, time.monotonic() + _HELLO_S, b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def hear(self, secret: str) -> tuple[str, Wire] | None:
        """Read what has arrived. Returns the engine's name and its wire once the first line is complete;
        closes the connection of a peer that is not an engine."""
        try:
            data = self._socket.recv(_HELLO_BYTES - len(self._said))
            is_over = not data
        except BlockingIOError:
            data, is_over = b"", time.monotonic() > self._until
        except OSError:
            data, is_over = b"", True
        self._said += data
        line, end, rest = self._said.partition(b"\n")
        said, _, name = line.partition(b" ")
        if end and not rest and hmac.compare_digest(said, secret.encode()):
            engine = name.decode(errors="replace")
            return engine, Wire(socket.socket(fileno=self._socket.detach()), f"engine {engine}")
        if end or is_over or len(self._said) >= _HELLO_BYTES:
            self.close()
        return None

    def close(self) -> None:
        self._socket.close()


def tell(wires: Iterable[Wire], message: Message, deadline: float, doing: str) -> None:
    """Send a message to all peers."""
    for wire in wires:
        wire.send(message, deadline, doing)


def hear(wires: Iterable[Wire], kind: str, deadline: float, doing: str) -> list[Message]:
    """Receive a message of `kind` from each peer, in the order of arrival. Raises EngineError as soon as one
    of those that have not answered yet fails."""
    silent, heard = list(wires), list[Message]()
    while silent:
        ready = [wire for wire in silent if wire.is_readable()] or readable(silent, _left(deadline))
        if not ready:
            raise silent[0].late(doing)
        for wire in ready:
            silent.remove(wire)
            heard.append(wire.receive(kind, deadline, doing))
    return heard


def own_end(wires: Iterable[Wire]) -> str:
    """This machine's own address on the connections; preferably not loopback, so that all peers can reach it
    if any of them is on another machine."""
    addresses = [wire._socket.getsockname()[0] for wire in wires]
    return next((a for a in addresses if not a.startswith("127.") and a != "::1"), addresses[0])


def readable(sockets: Iterable[T], seconds: float) -> list[T]:
    """The sockets with data, a new connection or end of file to read, after waiting at most `seconds` for the
    first. Uses poll, because select is limited to small file descriptors."""
    poll, by_number = select.poll(), {each.fileno(): each for each in sockets}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(seconds * 1000)]


def _left(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())
