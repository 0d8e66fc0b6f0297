"""Objects in child processes, whose methods are called from here with asyncio.

A child process has a session of its own, so Ctrl-C does not reach it. It ends with its parent, however that
ends, and with it all that it has started.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable
from typing import IO, Any

from braid.errors import BraidError, EnvError
from braid.processes import end, end_with, how_it_ended, kill_group, start_module
from braid.users import described

START_LIMIT_S = 120.0
"""Time limit for a new process to make its object."""
_LAST_WORDS = 2000
"""Characters of stderr in the error of a process that died."""
_SIZE_BYTES = 8


class Child:
    """An object in a child process. One call at a time; see `started`."""

    def __init__(self, make: Callable[[], object]) -> None:
        request = pickle.dumps(make)
        self._socket, theirs = socket.socketpair()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        with theirs:
            self._process = start_module(
                __name__,
                [theirs.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                PYTHONHASHSEED="0",  # sets have the same order in every process
                OMP_NUM_THREADS="1",
            )
        self._kill = weakref.finalize(self, _kill, self._process, self._socket, self._stderr)
        self._socket.setblocking(False)
        self._request = request

    @classmethod
    async def started(cls, make: Callable[[], object]) -> Child:
        """Start a process with the object that `make`, which must be picklable, returns there. Raises like
        `call`."""
        child = cls(make)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await child._answer(child._request, "the start")
        except TimeoutError:
            raise EnvError(f"a process did not start within {START_LIMIT_S:g} s") from None
        except BaseException:
            child.kill()
            raise
        return child

    @property
    def is_alive(self) -> bool:
        return self._kill.alive and self._process.poll() is None

    async def call(self, method: str, *arguments: object) -> Any:
        """Return what the object's method returns. A BraidError that it raises is raised here, any other
        exception as EnvError. If this is cancelled, as by a deadline, or the process ends, it is killed."""
        return await self._answer(pickle.dumps((method, arguments)), f"{method}()")

    async def _answer(self, request: bytes, what: str) -> Any:
        if not self._kill.alive:
            raise EnvError(f"{what} of a process that was killed")
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _framed(request))
            answer = await self._read(int.from_bytes(await self._read(_SIZE_BYTES)))
        except (OSError, EOFError):
            raise EnvError(f"during {what} the process {self._death()}") from None
        except BaseException:
            self.kill()
            raise
        try:
            value, error = pickle.loads(answer)
        except Exception as error:  # a value's own __reduce__ or __setstate__ may raise any
            raise EnvError(f"the value of {what} cannot be read: {described(error)}") from error
        if error is not None:
            raise error
        return value

    async def _read(self, size: int) -> bytearray:
        loop, read = asyncio.get_running_loop(), bytearray()
        while len(read) < size:
            if not (part := await loop.sock_recv(self._socket, min(size - len(read), 1 << 20))):
                raise EOFError
            read += part
        return read

    def _death(self) -> str:
        """Kill the process if it still runs; returns how it ended, and the end of its stderr."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_WORDS))
        words = self._stderr.read().decode(errors="replace").strip()
        self.kill()
        return how_it_ended(self._process.returncode) + (f"; stderr ends with:\n{words}" if words else "")

    def forget_stderr(self) -> None:
        """Drop what the process has written to stderr, which would otherwise grow with its calls."""
        os.ftruncate(self._stderr.fileno(), 0)
        self._stderr.seek(0)  # the process shares this position

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        self._kill()


def _kill(process: subprocess.Popen[bytes], connection: socket.socket, stderr: IO[bytes]) -> None:
    connection.close()
    end(process)
    stderr.close()


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_SIZE_BYTES) + data


def main(connection: socket.socket, parent: int) -> None:
    """Serve the calls of the parent until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)
    target: Any = None
    with connection.makefile("rwb") as stream:
        while size := stream.read(_SIZE_BYTES):
            request, value = stream.read(int.from_bytes(size)), None
            try:
                if target is None:
                    target = pickle.loads(request)()
                else:
                    method, arguments = pickle.loads(request)
                    value = getattr(target, method)(*arguments)
                answer = pickle.dumps((value, None))
            except BaseException as error:
                traceback.print_exc()
                answer = pickle.dumps((None, as_env_error(error)))
            stream.write(_framed(answer))
            stream.flush()
    kill_group(os.getpgrp())  # the parent has ended, and the thread may not have noticed yet


def as_env_error(error: BaseException) -> BraidError:
    """The error itself if it is braid's, else an EnvError that names the line which raised it."""
    if isinstance(error, BraidError):
        return error
    return EnvError(described(error))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
