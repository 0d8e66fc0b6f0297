"""Runs users' functions, which may hang, in daemon threads.

A thread cannot be killed, so a call that exceeds its time limit keeps its thread until it returns. A new
thread replaces it, and process exit does not wait for it. When too many threads are stuck, further calls fail
immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from braid.errors import RewardError
from braid.report.streams import REWARD_THREADS

T = TypeVar("T")

PING_S = 1.0
"""An event loop that does not respond within this time is considered blocked."""

Outcome = tuple[object, BaseException | None]
"""Return value and exception of a call. Exceptions are passed as values, so that none of them, SystemExit
included, ends the thread or the run."""


class _Worker:
    """A daemon thread that runs jobs sequentially until it receives None."""

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
    """Value of the call. Raises RewardError with the call's exception and the line that raised it; a
    RewardError is re-raised unchanged."""
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
    """Runs synchronous functions with a time limit, each caller in its own thread."""

    def __init__(self, *, max_stuck: int) -> None:
        self._idle: list[_Worker] = []
        self._late: list[Future[Outcome]] = []
        self._max_stuck = max_stuck

    async def run(self, function: Callable[[], object], timeout_s: float) -> object:
        """Return `function()`. Raises RewardError if it raises, takes longer than `timeout_s`, or too many
        earlier calls are stuck."""
        self._late = [future for future in self._late if not future.done()]
        if len(self._late) >= self._max_stuck:
            raise RewardError(
                f"{len(self._late)} earlier calls are still running after reward.timeout_s={timeout_s:g}; add a time limit to "
                "the function, or raise reward.timeout_s"
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
        """Stop idle threads. Stuck ones end with the process."""
        while self._idle:
            self._idle.pop().jobs.put(None)


class LoopThread:
    """Runs async functions on a separate event loop, so that one that blocks does not block training.

    The loop persists between calls, for functions that keep connections open; a blocked loop is replaced.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, function: Callable[[], Awaitable[object]], timeout_s: float) -> object:
        """Return `await function()`. Raises RewardError if it raises or takes longer than `timeout_s`."""
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

    def close(self) -> None:
        """Stop the loop, immediately or when the call that blocks it returns."""
        if self._loop is not None:
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


async def _within(future: Future[T], timeout_s: float) -> T:
    """Await the future's result. Cancels the future after `timeout_s`, or when the wait itself is
    cancelled."""
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
