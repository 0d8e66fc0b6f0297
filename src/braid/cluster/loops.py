"""Runs coroutines from synchronous code, and calls that may never return."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Loop:
    """An event loop that persists between calls. It runs while a call waits; with `in_background` all the
    time, in a thread, and so it does if a loop is already running here, as in a notebook, since Python allows
    one running loop per thread.

    A KeyboardInterrupt may be raised in any task, by a signal's handler. It ends the call that waits, once:
    asyncio stops the loop again at each task that passes it on to the one that awaits it, which would
    interrupt the later calls that close what is open."""

    def __init__(self, *, in_background: bool = False) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._report)
        self._interrupt: BaseException | None = None
        self._thread: threading.Thread | None = None
        if in_background or _is_running():
            self._thread = threading.Thread(target=self._loop.run_forever, name="braid-loop", daemon=True)
            self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to completion and return its result. With a thread, several threads may call."""
        if self._thread is None:
            task = self._loop.create_task(coroutine)
            while True:
                try:
                    return self._loop.run_until_complete(task)
                except (KeyboardInterrupt, SystemExit) as interrupt:
                    if interrupt is self._interrupt and not task.done():
                        continue
                    self._interrupt = interrupt
                    raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # after an interrupt

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what asyncio reports, except an interrupt in a task that nothing awaits."""
        if not isinstance(context.get("exception"), (KeyboardInterrupt, SystemExit)):
            loop.default_exception_handler(context)

    def close(self) -> None:
        """Cancel all tasks, and close the loop and its thread. Idempotent."""
        if self._loop.is_closed():
            return
        self.run(self._end())
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call in a new thread, which does not keep the process from exiting."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again by result()
            future.set_exception(error)

    threading.Thread(target=run, name="braid-call", daemon=True).start()
    return future


def call_until(call: Callable[[], object], deadline: float, watch: Callable[[], None] = lambda: None) -> None:
    """Make a call that may block for ever, as NCCL's do when a peer is gone. Raises TimeoutError after
    `deadline` (time.monotonic), and what `watch` raises in the meantime; the call then stays behind in its
    thread. Exceptions of the call are re-raised."""
    done = in_thread(call)
    while not wait([done], _TICK_S).done:
        watch()
        if time.monotonic() > deadline:
            raise TimeoutError
    done.result()


_TICK_S = 0.05


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An asyncio.TaskGroup that raises the exception of the first task that fails itself, not in a group."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        failure = group.exceptions[0]
    if failure is not None:  # here, where it does not get the group as its context
        raise failure


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
