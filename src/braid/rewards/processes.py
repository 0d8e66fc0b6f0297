"""Client of isolated scorers: starts their processes, sends requests, and kills processes that time out."""

from __future__ import annotations

import json
import pickle
import weakref
from functools import partial

from braid.errors import RewardError
from braid.processes import START_LIMIT_S, Child

from .threads import start, within

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
MAX_REPLY_BYTES = 1 << 20
"""A longer reply is treated as corrupt."""


class ScoringProcesses:
    """A pool of processes that run one of isolated.SCORERS, one per concurrent caller, started on demand."""

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._idle: list[Child] = []
        self._end = weakref.finalize(self, _kill_all, self._idle)

    async def run(self, arguments: tuple[object, ...], timeout_s: float, limit: str | None = None) -> object:
        """The scorer's value for `arguments`, clamped to 0..1. Raises RewardError if it fails or takes longer
        than `timeout_s`, not counting the start of a process. `limit` describes the limit in that error."""
        try:
            request = pickle.dumps((timeout_s, arguments))
        except Exception as error:  # a column's __reduce__ can raise anything
            raise RewardError(f"cannot send the prompt's fields to the scoring process: {error}") from error
        process = self._idle.pop() if self._idle else await self._started()
        value, error = await _ask(process, request, timeout_s, limit)
        self._idle.append(process)
        if error is not None:
            raise RewardError(str(error))
        return min(max(value, 0.0), 1.0) if isinstance(value, int | float) else value

    async def _started(self) -> Child:
        process = Child("braid.rewards.isolated", env=_ENVIRONMENT)
        limit = f"{START_LIMIT_S:g} s of starting the scoring process"
        _, error = await _ask(process, self._scorer.encode(), START_LIMIT_S, limit)
        if error is not None:
            process.kill()
            raise RewardError(f"cannot start the scoring process: {error}")
        return process

    def close(self) -> None:
        """Kill all idle processes."""
        _kill_all(self._idle)


async def _ask(process: Child, request: bytes, timeout_s: float, limit: str | None) -> tuple[object, object]:
    """Send the request, and return the value and error of the reply. Without one in time, the process is
    killed and RewardError raised."""
    try:
        return await within(start(partial(_answer, process, request)), timeout_s, limit)
    except BaseException:
        process.kill()
        raise


def _answer(process: Child, request: bytes) -> tuple[object, object]:
    try:
        process.channel.send(request)
        value, error = json.loads(process.channel.receive(longest=MAX_REPLY_BYTES))
    except (OSError, EOFError, TypeError, ValueError, RecursionError) as error:
        raise RewardError("the scoring process exited without a result (out of memory, or killed)") from error
    return value, error


def _kill_all(processes: list[Child]) -> None:
    while processes:
        processes.pop().kill()
