"""Runs coroutines from synchronous code, and calls that may never return."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Loop:
    """An event loop that persists between calls. If a loop is already running, as in a notebook, it runs in a
    separate thread, since Python allows one running loop per thread."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1, "braid-loop") if _is_running() else None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to completion and return its result."""
        if self._thread is None:
            return self._runner.run(coroutine)
        return self._thread.submit(self._runner.run, coroutine).result()

    def close(self) -> None:
        """Close the loop and its thread."""
        if self._thread is None:
            self._runner.close()
            return
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()


def call_until(call: Callable[[], object], deadline: float, watch: Callable[[], None] = lambda: None) -> None:
    """Make a call that may block for ever, as NCCL's do when a peer is gone. Raises TimeoutError after
    `deadline` (time.monotonic), and what `watch` raises in the meantime; the call then stays behind in its
    thread. Exceptions of the call are re-raised."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # re-raised in the calling thread
            failures.append(error)

    thread = threading.Thread(target=run, name="braid-call", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_TICK_S)
        if thread.is_alive():
            watch()
            if time.monotonic() > deadline:
                raise TimeoutError
    if failures:
        raise failures[0]


_TICK_S = 0.05


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. If one fails, or the caller is cancelled,
    the others are cancelled and awaited before the exception is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
