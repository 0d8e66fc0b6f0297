"""Client of isolated scorers: starts their processes, sends requests, and kills processes that time out."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import weakref
from functools import partial
from multiprocessing import Pipe

from braid.errors import RewardError
from braid.processes import descendants, kill

from .threads import start, within

START_LIMIT_S = 120.0
"""Time limit for a new process to import its scorer."""
MAX_REPLY_BYTES = 1 << 20
"""A longer reply is treated as corrupt."""


class _Process:
    """A process that runs `scorer`, and the connection to it."""

    def __init__(self, scorer: str) -> None:
        self._connection, theirs = Pipe()
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

    async def ask(self, request: bytes | None, timeout_s: float, limit: str | None) -> tuple[object, object]:
        """Send the request, and return the value and error of the next reply. Without a reply in time, the
        process is killed and RewardError raised."""
        try:
            return await within(start(partial(self._ask, request)), timeout_s, limit)
        except BaseException:
            self.kill()
            raise

    def _ask(self, request: bytes | None) -> tuple[object, object]:
        try:
            if request is not None:
                self._connection.send_bytes(request)
            value, error = json.loads(self._connection.recv_bytes(MAX_REPLY_BYTES))
        except (OSError, EOFError, TypeError, ValueError) as error:
            raise RewardError(
                "the scoring process exited without a result (out of memory, or killed)"
            ) from error
        return value, error

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        started = descendants(self._process.pid)
        self._process.kill()
        kill(started)
        self._process.wait()


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
        process = self._idle.pop() if self._idle else await self._started()
        value, error = await process.ask(request, timeout_s, limit)
        self._idle.append(process)
        if error is not None:
            raise RewardError(str(error))
        return min(max(value, 0.0), 1.0) if isinstance(value, int | float) else value

    async def _started(self) -> _Process:
        process = _Process(self._scorer)
        limit = f"{START_LIMIT_S:g} s of starting the scoring process"
        _, error = await process.ask(None, START_LIMIT_S, limit)
        if error is not None:
            process.kill()
            raise RewardError(f"cannot start the scoring process: {error}")
        return process

    def close(self) -> None:
        """Kill all idle processes."""
        _kill_all(self._idle)


def _kill_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().kill()
