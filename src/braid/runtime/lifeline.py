"""Liveness connection between the driver and each worker process, independent of Ray.

    worker                                    driver
    Lifeline ───── log records ─────────────> Lifelines, which logs them
       │                                         │
       └ closed: the process kills itself        └ closed: the worker is lost

Each end notices at once when the other has exited, even if it was killed, since the kernel then closes the
connection. Over TCP, a worker sends its secret as the first line, then records as lines of JSON. If the first
line of a peer is not a worker's secret, the driver closes the connection and parses nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from braid.processes import descendants, kill

from .oom import KillCount

logger = logging.getLogger(__name__)

_TICK_S = 0.5
"""Time, in seconds, that a record waits for the same record of other ranks; also how close to a worker's exit
an OOM kill must be to count as its cause."""
_MAX_LINE = 1 << 16
"""Most bytes of a line; JSON may need twelve for a character of a record."""
_MAX_HELLO, _HELLO_S, _MAX_CALLERS = 256, 10.0, 128
"""Limits for peers that have not sent a worker's secret yet: bytes read, seconds to send it, and number of
such peers."""
_MAX_TEXT = 2000
"""Characters to which a record is cut for sending; the worker's log has the full text."""
_CONNECT_TIMEOUT_S = 30.0
_END_S = 10.0
"""Time limit, in seconds, for workers to stop their child processes, and then for the driver to stop the
workers."""
_BYE = b"."


class Team(Protocol):
    """The worker group of a worker."""

    @property
    def role(self) -> str: ...
    @property
    def size(self) -> int: ...


class Member(NamedTuple):
    """A worker: `rank` of its team."""

    team: Team
    rank: int

    def __str__(self) -> str:
        return f"{self.team.role} worker {self.rank} of {self.team.size}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a worker needs to connect. `log` is the log file of a worker on `machine`; None keeps its current
    output."""

    host: str
    port: int
    word: str
    machine: str
    log: Path | None


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost worker. `said` is the reason that it reported, None if its process died; `is_oom` if it was
    killed for lack of memory (False: unknown)."""

    member: Member
    said: str | None = None
    is_oom: bool = False


class Lifelines:
    """The driver's end of all connections."""

    def __init__(self, host: str, kills: KillCount | None = None) -> None:
        """Listen at `host`, an address of this machine that workers can reach. `kills` counts OOM kills on
        this machine."""
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=128)
        self._members: dict[str, Member] = {}
        self._lines: dict[str, _Line] = {}
        self._losses: list[Loss] = []
        self._changed = threading.Condition()
        self._records = _Records()
        self._kills = kills or KillCount()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="lifelines", daemon=True)
        self._thread.start()

    def ticket(self, member: Member, log: Path | None) -> Ticket:
        """The ticket with which `member` connects."""
        word = secrets.token_hex(16)
        self._members[word] = member
        host, port = self._listener.getsockname()[:2]
        return Ticket(host, port, word, _machine(), log)

    def first_loss(self, timeout_s: float = 0.0) -> Loss | None:
        """The first lost worker of all teams that have not been forgotten; waits up to `timeout_s` for
        one."""
        with self._changed:
            self._changed.wait_for(lambda: self._losses, timeout_s)
            return self._losses[0] if self._losses else None

    def forget(self, team: Team) -> None:
        """Have the workers of a team kill their child processes, so that the workers can be killed next; they
        no longer count as losses. Waits up to _END_S for them."""
        with self._changed:
            self._losses = [loss for loss in self._losses if loss.member.team is not team]
            words = [word for word, member in self._members.items() if member.team is team]
            for word in words:
                del self._members[word]
            lines = [line for word in words if (line := self._lines.pop(word, None)) is not None]
            for line in lines:
                line.end()
            self._changed.wait_for(lambda: all(line.is_cut for line in lines), _END_S)

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes the thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._selector.select(_TICK_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.data)
                self._drop_strangers()
                self._kills.update()
                self._records.tell(until=time.monotonic() - _TICK_S)
        finally:
            self._records.tell()
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]  # they are sockets
            self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # closing, or the peer has disconnected
            return
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._selector.register(connection, selectors.EVENT_READ, _Line(connection))

    def _drop_strangers(self) -> None:
        """Close connections that have not sent a worker's secret in time, and the oldest ones beyond the
        limit."""
        lines = [key.data for key in self._selector.get_map().values() if isinstance(key.data, _Line)]
        strangers = [line for line in lines if line.word is None]
        for number, line in enumerate(reversed(strangers)):
            if number >= _MAX_CALLERS or time.monotonic() > line.since_s + _HELLO_S:
                self._cut(line)

    def _read(self, line: _Line) -> None:
        for text in line.read():
            if line.word is None:
                with self._changed:
                    line.word = next(
                        (w for w in self._members if hmac.compare_digest(w.encode(), text)), None
                    )
                    if line.word is None:
                        line.cut()
                        break
                    self._lines[line.word] = line
            elif (message := _message(text)) is not None:
                self._on(line.word, message)
            else:
                line.cut()
                break
        if line.is_cut:
            self._cut(line)

    def _cut(self, line: _Line) -> None:
        line.is_cut = True
        self._selector.unregister(line.socket)
        line.socket.close()
        self._lose(line.word)

    def _on(self, word: str, message: dict[str, Any]) -> None:
        with self._changed:
            member = self._members.get(word)
            if member is None:
                return
            if "failed" in message:
                self._losses.append(Loss(member, said=message["failed"]))
                self._changed.notify_all()
                return
        self._records.add(member, message["level"], message["text"])

    def _lose(self, word: str | None) -> None:
        with self._changed:
            member = self._members.get(word or "")
            if member is not None:
                self._losses.append(Loss(member, is_oom=self._kills.has_risen()))
            self._changed.notify_all()


@dataclass(eq=False, slots=True)
class _Line:
    """A connection. `word` is the worker's secret, None until it has been received."""

    socket: socket.socket
    word: str | None = None
    is_cut: bool = False
    since_s: float = field(default_factory=time.monotonic)
    _rest: bytes = b""

    def read(self) -> Iterator[bytes]:
        """Read the complete lines that have arrived. A line that is too long closes the connection."""
        try:
            data = self.socket.recv(_MAX_HELLO if self.word is None else _MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.is_cut = self.is_cut or not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from lines
        if len(self._rest) > (_MAX_HELLO if self.word is None else _MAX_LINE):
            self.cut()

    def end(self) -> None:
        """Announce an intended shutdown. The worker closes the connection once its child processes have been
        killed."""
        with contextlib.suppress(OSError):
            self.socket.send(_BYE)
            self.socket.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Close the connection of a peer that is not a worker."""
        self.is_cut = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def _message(text: bytes) -> dict[str, Any] | None:
    """Parse a worker's message; None if it is not valid."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match message:
        case {"failed": str()} | {"level": int(), "text": str()}:
            return message
    return None


@dataclass(slots=True)
class _Said:
    """A record that waits for the same record of other ranks."""

    member: Member
    level: int
    text: str
    since_s: float
    ranks: list[int]


@dataclass(slots=True)
class _Records:
    """Log records of workers. A record of several ranks of a team is logged once, with the number of ranks: a
    rank's nth record of a text is merged with the nth of the other ranks."""

    _waiting: dict[tuple[int, int, str], _Said] = field(default_factory=dict)
    _told: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    _heard: Counter[tuple[int, int, str, int]] = field(default_factory=Counter)

    def add(self, member: Member, level: int, text: str) -> None:
        key = (id(member.team), level, text)
        self._heard[*key, member.rank] += 1
        number = self._heard[*key, member.rank]
        if number <= self._told[key]:
            return
        said = self._waiting.get(key)
        if said is None:
            self._waiting[key] = _Said(member, level, text, time.monotonic(), [member.rank])
        elif member.rank in said.ranks:
            self._tell(key)
            self._waiting[key] = _Said(member, level, text, time.monotonic(), [member.rank])
        else:
            said.ranks.append(member.rank)

    def tell(self, until: float = float("inf")) -> None:
        """Log the records that have waited since `until` or longer."""
        for key in [key for key, said in self._waiting.items() if said.since_s <= until]:
            self._tell(key)

    def _tell(self, key: tuple[int, int, str]) -> None:
        said = self._waiting.pop(key)
        self._told[key] += 1
        team, ranks = said.member.team, sorted(said.ranks)
        if len(ranks) == 1:
            who = str(Member(team, ranks[0]))
        elif len(ranks) == team.size:
            who = f"all {team.size} {team.role} workers"
        else:
            who = f"{len(ranks)} of {team.size} {team.role} workers"
        logger.log(said.level, "%s: %s", who, said.text)


class Lifeline:
    """A worker's end. The process ends, with all that it has started, when the driver's end is gone; what it
    writes goes to the ticket's log, and what it warns of to the driver, too."""

    def __init__(self, ticket: Ticket, beside: Iterable[int] = ()) -> None:
        """`beside` are processes that are to end with the driver, too, when it has been killed."""
        if ticket.log is not None and ticket.machine == _machine():
            _write_to(ticket.log)
        self._beside = [handle for pid in beside if (handle := _handle(pid)) is not None]
        self._socket = socket.create_connection((ticket.host, ticket.port), _CONNECT_TIMEOUT_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sending, self._is_full = threading.Lock(), False
        self._socket.sendall(f"{ticket.word}\n".encode())
        threading.Thread(target=self._hold, name="lifeline", daemon=True).start()
        _own.append(self)
        logging.captureWarnings(capture=True)
        logging.getLogger().addHandler(_written())
        logging.getLogger().addHandler(_Told(self))
        logging.getLogger("braid").setLevel(logging.INFO)

    def tell(self, level: int, text: str) -> None:
        """Have the driver log a record."""
        self._say({"level": level, "text": text[:_MAX_TEXT]})

    def fail(self, why: str) -> None:
        """Have the driver fail the run: this worker cannot continue, though its process is alive."""
        self._say({"failed": why[:_MAX_TEXT]})

    def _say(self, message: dict[str, Any]) -> None:
        """Send a message without blocking: once the driver has stopped reading, nothing more is sent."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            if not self._is_full:
                self._is_full = True
                self._is_full = self._socket.send(data, socket.MSG_DONTWAIT) < len(data)

    def _hold(self) -> None:
        said = b""
        with contextlib.suppress(OSError):
            said = self._socket.recv(len(_BYE))
        for call in list(_at_end):
            with contextlib.suppress(Exception):
                call()
        for handle in () if said == _BYE else self._beside:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for _ in range(2):  # the second time those that the first has missed
            kill(descendants(os.getpid()))
        if said == _BYE:  # the driver stops this process through Ray
            self._socket.close()
            time.sleep(_END_S)
        kill([os.getpid()])


_own: list[Lifeline] = []
"""The connection of this process, if it is a worker."""


def give_up(why: str) -> None:
    """Tell the driver that this process cannot continue, so that the run fails at once and not at the next
    call. Does nothing in the driver's process."""
    for lifeline in _own:
        lifeline.fail(why)


_at_end: set[Callable[[], object]] = set()


def at_end(call: Callable[[], object]) -> Callable[[], object]:
    """Register a cleanup, such as removing files, that runs when the driver stops this worker or has exited,
    before its child processes are killed. Returns a function that unregisters it."""
    _at_end.add(call)
    return lambda: _at_end.discard(call)


class _Told(logging.Handler):
    """Log handler that sends warnings and errors to the driver."""

    def __init__(self, lifeline: Lifeline) -> None:
        super().__init__(logging.WARNING)
        self._lifeline = lifeline

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.name == "py.warnings":  # the first line is the message, then comes the source text
                text = text.splitlines()[0]
            self._lifeline.tell(record.levelno, text)
        except Exception:  # by the contract of logging handlers: a broken message must not end the run
            self.handleError(record)


def _written() -> logging.Handler:
    """Log handler of the worker's log file."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def _write_to(log: Path) -> None:
    """Redirect standard output and error of this process and its children to the file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _machine() -> str:
    """Id of this machine since its last boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _handle(pid: int) -> int | None:
    """A pidfd of the process, which stays valid if the pid is reused; None if the process has exited."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def family_of(host: str) -> socket.AddressFamily:
    """Address family of `host`: IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
