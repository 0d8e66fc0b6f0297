"""The connection between a process and its child: messages in frames, each of 8 bytes of length and then the
content, over a pair of sockets."""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

_LENGTH = struct.Struct("!Q")
_LONGEST_WAIT_S = 1e6
"""Longest timeout that poll accepts."""


class Channel:
    """One end. Several threads may send; one receives. A message that is cut off, by its deadline or an
    exception such as KeyboardInterrupt, ends the connection (`is_shut`), and the caller ends the other
    process."""

    def __init__(self, connection: socket.socket, handle: int | None = None) -> None:
        """`handle` is a pidfd of the process at the other end, which the channel closes."""
        connection.setblocking(False)
        self._socket, self._handle = connection, handle
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.is_shut = False

    def send(self, content: bytes, deadline: float = math.inf) -> None:
        """Send a message. Raises OSError if the other side is gone, and TimeoutError, one of them, after
        `deadline` (time.monotonic)."""
        with self._sending:
            left = memoryview(_LENGTH.pack(len(content)) + content)
            try:
                while left:
                    try:
                        left = left[self._socket.send(left) :]
                    except BlockingIOError:
                        self._wait(select.POLLOUT, deadline)
            except EOFError:
                raise BrokenPipeError from None
            except OSError:
                raise
            except BaseException:  # an interrupt
                self._shut()  # the next message would be read as the rest of this
                raise

    def reply(self, content: bytes) -> None:
        """Send an answer, unless the other side is gone, which the end of `messages` says: a child whose
        answer fails must not exit before it has ended what it has started."""
        with suppress(OSError):
            self.send(content)

    def receive(self, deadline: float = math.inf, longest: int | None = None) -> bytes:
        """The next message. Raises EOFError if the other side is gone, TimeoutError after `deadline`, and
        OSError for one above `longest` bytes."""
        with self._receiving:
            self._wait(select.POLLIN, deadline)
            try:
                return bytes(self._read(_checked(self._read(_LENGTH.size, deadline), longest), deadline))
            except BaseException:
                self._shut()  # the rest of this message would be read as the next
                raise

    def poll(self, seconds: float) -> bool:
        """Whether the other side has sent something or is gone, after waiting for `seconds` at most."""
        with self._receiving:
            try:
                self._wait(select.POLLIN, time.monotonic() + seconds)
            except TimeoutError:
                return False
            except EOFError:  # the next message says so, after those that have arrived
                return True
        return True

    def messages(self) -> Iterator[bytes]:
        """The messages until the other side closes its end or is gone."""
        with suppress(EOFError, OSError):
            while True:
                yield self.receive()

    async def ask(self, content: bytes) -> bytes:
        """Send a message, and return the next one from the other side. Raises like `receive`."""
        loop = asyncio.get_running_loop()
        if self._handle is not None:  # what has arrived can still be read
            loop.add_reader(self._handle, self._shut)
        try:
            await loop.sock_sendall(self._socket, _LENGTH.pack(len(content)) + content)
            return bytes(await self._read_async(_checked(await self._read_async(_LENGTH.size), None)))
        finally:
            if self._handle is not None:
                loop.remove_reader(self._handle)

    def close(self) -> None:
        """Close this end. Threads that send or receive fail with OSError or EOFError. Idempotent."""
        self._shut()
        with self._sending, self._receiving:  # none uses a descriptor that another file may get
            self._socket.close()
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    def __del__(self) -> None:
        self.close()

    def _read(self, size: int, deadline: float) -> bytearray:
        content = bytearray(size)
        left = memoryview(content)
        while left:
            try:
                received = self._socket.recv_into(left)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            if not received:
                raise EOFError
            left = left[received:]
        return content

    async def _read_async(self, size: int) -> bytearray:
        loop, content = asyncio.get_running_loop(), bytearray(size)
        left = memoryview(content)
        while left:
            if not (received := await loop.sock_recv_into(self._socket, left)):
                raise EOFError
            left = left[received:]
        return content

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the socket is ready. Raises TimeoutError, or EOFError if the other side is gone."""
        poll, number = select.poll(), self._socket.fileno()
        if number < 0:
            raise EOFError
        poll.register(number, event)
        if self._handle is not None:
            poll.register(self._handle, select.POLLIN)
        left_s = min(max(0.0, deadline - time.monotonic()), _LONGEST_WAIT_S)
        ready = dict(poll.poll(math.ceil(1e3 * left_s)))
        if not ready and time.monotonic() >= deadline:
            raise TimeoutError
        if ready and number not in ready:
            raise EOFError

    def _shut(self) -> None:
        self.is_shut = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _checked(header: bytearray, longest: int | None) -> int:
    """The length of a message."""
    (size,) = _LENGTH.unpack(header)
    if longest is not None and size > longest:
        raise OSError(f"a message of {size} bytes, above {longest}")
    return size
