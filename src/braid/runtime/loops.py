"""Runs coroutines from synchronous code, and calls that may never return."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
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


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
