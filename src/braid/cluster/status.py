"""What a run does and waits for, printed when its process gets SIGUSR1; the run goes on."""

from __future__ import annotations

import faulthandler
import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import WeakSet

from braid.processes import stacks_on_signal

logger = logging.getLogger(__name__)

_NUMBER = getattr(signal, "SIGUSR1", None)


class OpenCall(Protocol):
    """A call of workers that may not have returned yet."""

    def waits_for(self) -> str | None:
        """Which workers have not returned, for how long, and where they are; None once all have."""
        ...


open_calls: WeakSet[OpenCall] = WeakSet()
"""The calls that the run holds."""


@contextmanager
def status_on_signal(doing: Callable[[], str]) -> Iterator[None]:
    """Within the block, SIGUSR1 logs `doing()` and the open calls, after the stacks of this process's
    threads. Has no effect outside the main thread, the only one that handles signals."""
    if _NUMBER is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    had_stacks = faulthandler.unregister(_NUMBER)
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    before = signal.signal(_NUMBER, lambda *_: asked.put(True))  # a handler must not wait for locks
    stacks_on_signal(chain=True)
    thread = threading.Thread(target=_answer, args=[asked, doing], name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        faulthandler.unregister(_NUMBER)
        signal.signal(_NUMBER, signal.SIG_DFL if before is None else before)
        if had_stacks:
            stacks_on_signal()
        asked.put(False)


def _answer(asked: queue.SimpleQueue[bool], doing: Callable[[], str]) -> None:
    while asked.get():
        waits: list[str] = []
        for call in list(open_calls):
            with suppress(Exception):  # the workers may be ended meanwhile
                waits += filter(None, [call.waits_for()])
        logger.info("\n  ".join([f"SIGUSR1: {doing()}", *(f"waits for {text}" for text in waits)]))
