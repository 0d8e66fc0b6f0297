"""Ends a process that a signal has asked to end, and that does not: its main thread may be in a call that
nothing interrupts, or may take minutes to release what it holds."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .interrupts import StopSignals

ENDS_WITHIN_S = 30.0
"""Seconds after which a process that has to end is ended."""
EXIT_CODE = 130
_TICK_S = 0.1


@contextmanager
def last_resort(stop: StopSignals, numbers: Collection[int], *, same_s: float) -> Iterator[None]:
    """Within the block, end the process with EXIT_CODE, ENDS_WITHIN_S seconds after it had to end according
    to `stop`; or after a signal of `numbers`, the second one where the first leaves time for a checkpoint,
    that the main thread has not handled. Signals within `same_s` seconds count as one. In the main thread
    only.

    The C-level handler writes each signal's number to a socket (signal.set_wakeup_fd), whatever the main
    thread does."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=[stop, receiver, frozenset(numbers), same_s], daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        sender.close()
        thread.join()
        receiver.close()


def _watch(stop: StopSignals, receiver: socket.socket, numbers: Collection[int], same_s: float) -> None:
    requests: list[float] = []
    num_sent = num_others = 0
    is_begun = False
    while True:
        if select.select([receiver], [], [], _TICK_S if is_begun else None)[0]:
            if not (received := receiver.recv(256)):
                return
            is_begun, sent = True, stop.num_sent
            num_others += sum(number in numbers for number in received) - (sent - num_sent)
            num_sent = sent
            now_s = time.monotonic()
            for _ in range(num_others):
                if not requests or now_s - requests[-1] >= same_s:
                    requests.append(now_s)
            num_others = min(num_others, 0)
        since_s = stop.must_end_since_s
        if since_s is None:
            due = requests[1:] if stop.is_graceful else requests
            since_s = due[0] if due else None
        if since_s is not None and time.monotonic() - since_s > ENDS_WITHIN_S:
            why = f"braid: still busy {ENDS_WITHIN_S:g} s after it had to end; ended without cleaning up\n"
            os.write(2, why.encode())
            os._exit(EXIT_CODE)
