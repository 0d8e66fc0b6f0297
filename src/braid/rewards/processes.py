"""Client of isolated scorers: starts their processes, sends requests, and kills processes that time out."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import subprocess
import sys
import weakref
from typing import Any

from braid.errors import RewardError
from braid.processes import descendants, kill

from .isolated import HEADER

START_LIMIT_S = 120.0
"""Time limit for a new process to import its scorer."""
MAX_REPLY_BYTES = 1 << 20
"""A longer reply is treated as corrupt."""


class _Process:
    """A process that runs `scorer`, and the socket to it."""

    def __init__(self, scorer: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-B", "-m", "braid.rewards.isolated", scorer],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    async def reply(self) -> dict[str, Any]:
        """The next message. Raises RewardError if the process ended or sent an invalid message."""
        try:
            (length,) = HEADER.unpack(await self._read(HEADER.size))
            if length > MAX_REPLY_BYTES:
                raise ValueError("too long")
            message = json.loads(await self._read(length))
            if not isinstance(message, dict):
                raise ValueError("no object")
        except (OSError, EOFError, ValueError) as error:
            raise RewardError(
                "the scoring process exited without a result (out of memory, or killed)"
            ) from error
        return message

    async def ask(self, request: bytes) -> dict[str, Any]:
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, HEADER.pack(len(request)) + request)
        except OSError as error:
            raise RewardError("the scoring process has exited") from error
        return await self.reply()

    async def _read(self, count: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < count:
            chunk = await loop.sock_recv(self._socket, count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        started = descendants(self._process.pid)
        self._process.kill()
        kill(started)
        self._process.wait()
        self._socket.close()


class ScoringProcesses:
    """A pool of processes that run one of isolated.SCORERS, one per concurrent caller, started on demand."""

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._idle: list[_Process] = []
        self._end = weakref.finalize(self, _kill_all, self._idle)

    async def run(self, arguments: tuple[object, ...], timeout_s: float, limit: str | None = None) -> object:
        """The scorer's value for `arguments`, clamped to 0..1. Raises RewardError if it fails or takes longer
        than `timeout_s`, not counting the start of a process. `limit` describes the limit in that error."""
        try:
            request = pickle.dumps((timeout_s, arguments))
        except Exception as error:  # a column's __reduce__ can raise anything
            raise RewardError(f"cannot send the prompt's fields to the scoring process: {error}") from error
        process = self._idle.pop() if self._idle else await self._start()
        is_well = False
        try:
            async with asyncio.timeout(timeout_s):
                reply = await process.ask(request)
            is_well = True
        except TimeoutError as error:
            raise RewardError(f"no result within {limit or f'reward.timeout_s={timeout_s:g}'}") from error
        finally:
            if is_well:
                self._idle.append(process)
            else:
                process.kill()
        if "error" in reply:
            raise RewardError(str(reply["error"]))
        value = reply.get("value")
        return min(max(value, 0.0), 1.0) if isinstance(value, int | float) else value

    async def _start(self) -> _Process:
        process = _Process(self._scorer)
        is_well = False
        try:
            async with asyncio.timeout(START_LIMIT_S):
                reply = await process.reply()
            is_well = "error" not in reply
        except TimeoutError as error:
            raise RewardError(f"the scoring process did not start within {START_LIMIT_S:g} s") from error
        finally:
            if not is_well:
                process.kill()
        if not is_well:
            raise RewardError(f"cannot start the scoring process: {reply['error']}")
        return process

    def close(self) -> None:
        """Kill all idle processes."""
        _kill_all(self._idle)


def _kill_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().kill()
