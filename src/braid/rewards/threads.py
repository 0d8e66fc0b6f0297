"""Runs functions that may hang: each call in a separate daemon thread, or on an event loop in one.

A thread cannot be killed, so a call that exceeds its time limit keeps its thread until it returns. Process
exit does not wait for it. When too many calls of a function are stuck, further ones fail immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from braid.errors import RewardError
from braid.isolation import threads
from braid.report.streams import REWARD_THREADS
from braid.users import described

T = TypeVar("T")

PING_S = 1.0
"""An event loop that does not respond within this time is considered blocked."""


def start(function: Callable[[], T]) -> Future[T]:
    """Call the function in a separate thread. The future fails with RewardError if it raises."""

    def call() -> T:
        try:
            return function()
        except BaseException as error:
            raise _as_reward_error(error) from error

    return threads.start(call)


async def within(future: Future[T], timeout_s: float, limit: str | None = None) -> T:
    """Await the future's result. Cancels the future after `timeout_s`, or when the wait itself is cancelled.
    `limit` describes the limit in the RewardError."""
    wrapped = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({wrapped}, timeout=timeout_s)
    finally:
        wrapped.cancel()
        future.cancel()  # wrapped does so only in the next iteration of the event loop
    if not done:
        raise RewardError(f"no result within {limit or f'reward.timeout_s={timeout_s:g}'}")
    try:
        return wrapped.result()
    except asyncio.CancelledError:
        raise RewardError("the call was cancelled") from None


def _as_reward_error(error: BaseException) -> BaseException:
    """A RewardError for any exception, also for one that would end the thread or the run; cancellation
    stays."""
    is_own = isinstance(error, RewardError | asyncio.CancelledError)
    return error if is_own else RewardError(described(error))


class CallThreads:
    """Runs a synchronous function with a time limit, several calls at a time."""

    def __init__(self, *, max_stuck: int) -> None:
        self._late: list[Future[object]] = []
        self._max_stuck = max_stuck

    async def run(self, function: Callable[[], object], timeout_s: float) -> object:
        """Return `function()`. Raises RewardError if it raises, takes longer than `timeout_s`, or too many
        earlier calls are stuck."""
        self._late = [future for future in self._late if not future.done()]
        if len(self._late) >= self._max_stuck:
            raise RewardError(
                f"{len(self._late)} earlier calls are still running after reward.timeout_s={timeout_s:g}; "
                "add a time limit to the function, or raise reward.timeout_s"
            )
        future = start(function)
        try:
            return await within(future, timeout_s)
        finally:
            if not future.done():
                self._late.append(future)

    def close(self) -> None:
        """Nothing to stop: stuck threads end with the process."""


class LoopThread:
    """Runs async functions on a separate event loop, so that one that blocks does not block training.

    The loop persists between calls, for functions that keep connections open; a blocked loop is replaced.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, function: Callable[[], Awaitable[object]], timeout_s: float) -> object:
        """Return `await function()`. Raises RewardError if it raises or takes longer than `timeout_s`."""
        loop = self._loop = self._loop or _started_loop()
        future = asyncio.run_coroutine_threadsafe(_call(function), loop)
        try:
            return await within(future, timeout_s)
        except RewardError:
            if future.cancelled():
                await self._replace_if_blocked(loop)
            raise

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await within(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop), PING_S)
        except RewardError:
            if self._loop is loop:
                self.close()

    def close(self) -> None:
        """Stop the loop, immediately or when the call that blocks it returns."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


async def _call(function: Callable[[], Awaitable[object]]) -> object:
    try:
        return await function()
    except BaseException as error:
        raise _as_reward_error(error) from error


def _started_loop() -> asyncio.AbstractEventLoop:
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()

    def serve() -> None:
        with runner:  # cancels what still runs at the end
            loop.run_forever()

    Thread(target=serve, name=f"{REWARD_THREADS}-loop", daemon=True).start()
    return loop
