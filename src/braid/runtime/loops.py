"""Runs coroutines from synchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
