"""Calls of users' functions that may hang: they run in daemon threads, and a stuck one is left behind.

A thread cannot be killed. So a call that outlives its limit keeps its thread until it returns, a new thread takes
its place, and nothing waits for it when the process ends. When too many are stuck, further calls fail at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from braid.errors import RewardError
from braid.report.streams import REWARD_THREADS

T = TypeVar("T")

PING_S = 1.0
"""An event loop that does not answer within this is held up by a call that blocks it."""

Outcome = tuple[object, BaseException | None]
"""What a call returned, or what it raised: an exception that ends a thread must not end the training."""


class _Worker:
    """A daemon thread that runs one job after another, until None."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[Callable[[], object], Future[Outcome]] | None] = SimpleQueue()
        Thread(target=self._serve, name=REWARD_THREADS, daemon=True).start()

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            function, future = job
            if future.set_running_or_notify_cancel():
                future.set_result(_outcome(function))


def _outcome(function: Callable[[], object]) -> Outcome:
    try:
        return function(), None
    except BaseException as error:
        return None, error


def _value_of(outcome: Outcome) -> object:
    """The call's value. Raises RewardError with what the call raised and the line that raised it; a RewardError as it is."""
    value, error = outcome
    if error is None:
        return value
    if isinstance(error, RewardError):
        raise error
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else ""
    raise RewardError(f"{type(error).__name__}: {error}{where}") from error


class ReplaceableThreads:
    """Runs plain functions, as many at a time as there are callers, each within a time limit."""

    def __init__(self, *, max_stuck: int) -> None:
        self._idle: list[_Worker] = []
        self._late: list[Future[Outcome]] = []
        self._max_stuck = max_stuck

    async def run(self, function: Callable[[], object], timeout_s: float) -> object:
        """What `function()` returns. Raises RewardError when it raises or takes longer than `timeout_s`."""
        self._late = [future for future in self._late if not future.done()]
        if len(self._late) >= self._max_stuck:
            raise RewardError(
                f"{len(self._late)} earlier calls still run past reward.timeout_s={timeout_s:g}; give the function a time "
                "limit of its own, or raise reward.timeout_s"
            )
        worker = self._idle.pop() if self._idle else _Worker()
        future: Future[Outcome] = Future()
        worker.jobs.put((function, future))
        try:
            return _value_of(await _within(future, timeout_s))
        finally:
            if future.done() and not future.cancelled():
                self._idle.append(worker)
            else:
                worker.jobs.put(None)
                self._late.append(future)

    def close(self) -> None:
        """Let idle threads end. Stuck ones end with the process."""
        while self._idle:
            self._idle.pop().jobs.put(None)


class LoopThread:
    """Runs async functions on an event loop of their own, so that one that blocks holds up no training.

    The loop stays the same between calls, as clients with open connections need; it is replaced when blocked.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, function: Callable[[], Awaitable[object]], timeout_s: float | None) -> object:
        """What `await function()` returns. Raises RewardError when it raises or takes longer than `timeout_s` (None: as long as
        the caller waits)."""
        loop = self._loop = self._loop or _started_loop()
        future = asyncio.run_coroutine_threadsafe(_async_outcome(function), loop)
        try:
            outcome = await _within(future, timeout_s)
        except RewardError:
            await self._replace_if_blocked(loop)
            raise
        return _value_of(outcome)

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await _within(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop), PING_S)
        except RewardError:
            if self._loop is loop:
                self.close()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Stop the loop, at once or when what blocks it returns; `last` is awaited on it before, for PING_S at most."""
        if self._loop is None:
            return
        if last is not None:
            wait({asyncio.run_coroutine_threadsafe(last(), self._loop)}, timeout=PING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None


async def _async_outcome(function: Callable[[], Awaitable[object]]) -> Outcome:
    try:
        return await function(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def serve() -> None:
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    Thread(target=serve, name=f"{REWARD_THREADS}-loop", daemon=True).start()
    return loop


async def _within(future: Future[T], timeout_s: float | None) -> T:
    """The future's result. It is asked to cancel after `timeout_s`, or when the waiting itself is cancelled."""
    wrapped = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({wrapped}, timeout=timeout_s)
    except asyncio.CancelledError:
        wrapped.cancel()
        raise
    if not done:
        wrapped.cancel()
        raise RewardError(f"no result within reward.timeout_s={timeout_s:g}")
    if wrapped.cancelled():
        raise RewardError("the call was cancelled")
    return wrapped.result()
