"""Ctrl-C and SIGTERM at moments that cannot be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """Keep SIGINT and SIGTERM from the block; the list has those that came, for the caller to heed. Handlers that the block sets
    for them are put back. Does nothing outside the main thread, which no signal reaches."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _: caught.append(got)) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
