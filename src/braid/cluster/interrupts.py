"""Handling of SIGINT (Ctrl-C), SIGTERM and SIGHUP: graceful stops, and blocks that signals cannot
interrupt."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, NoReturn

from .last_resort import last_resort

logger = logging.getLogger(__name__)

NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_SAME_S = 0.5
"""Further signals within this time, in seconds, count as the same request: a key held down, or a wrapper that
forwards a signal that the terminal has also sent."""
_AGAIN_S = 0.01
"""Time until the next attempt to cut a round, in seconds."""


class RoundCut(KeyboardInterrupt):
    """The round cannot finish within the grace period after a signal."""


class StopSignals:
    """Signal handling of the run in this process. A signal raises KeyboardInterrupt, once; while the process
    shuts down, further signals are ignored. Within `graceful` the first signal only sets `is_requested`, and
    the next one raises.

    A handler may interrupt the main thread anywhere, even within another handler, so it neither blocks nor
    starts threads: `_watch`, in a separate thread, logs the request and enforces the time limit."""

    def __init__(self) -> None:
        self.is_requested = False
        self._is_ending = False
        self._ending_since_s: float | None = None
        self._late_since_s: float | None = None
        self.num_sent = 0
        """Number of signals that `_watch` has sent."""
        self._sent_at_s = 0.0
        self._cut_is_due = False
        self._grace_s: float | None = None
        self._since_s = 0.0
        self._cuttable = 0
        self._finishing = 0
        self._to_watch: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """The number of the signal that asks for a stop; None ends `_watch`. Its `put` may be interrupted by
        a handler that calls it."""

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal that interrupted `frame`."""
        if self._is_ending:
            return
        if self._cut_is_due:  # sent by _watch
            if _is_in_context_manager(frame):
                return
            self._cut_is_due = False
            if self._cuttable:
                raise RoundCut
        elif self._grace_s is None:
            self.end()
        elif not self.is_requested:
            self.is_requested, self._since_s = True, time.monotonic()
            self._to_watch.put(number)
        elif time.monotonic() - max(self._since_s, self._sent_at_s) > _SAME_S:
            self.end()

    def end(self) -> NoReturn:
        """Raise KeyboardInterrupt, and ignore further signals."""
        self._is_ending, self._ending_since_s = True, time.monotonic()
        raise KeyboardInterrupt

    @property
    def must_end_since_s(self) -> float | None:
        """When (time.monotonic) the run had to end, or its time was over; None if neither is so, and in
        `finishing`."""
        if self._ending_since_s is not None:
            return self._ending_since_s
        return None if self._finishing else self._late_since_s

    @property
    def is_graceful(self) -> bool:
        """Whether the first signal leaves time to stop."""
        return self._grace_s is not None

    @contextmanager
    def graceful(self, within_s: float) -> Iterator[None]:
        """After the first signal, give the block `within_s` seconds to finish; with 0 the signal raises
        KeyboardInterrupt at once. After the block signals are ignored, since the run is over."""
        self._grace_s = within_s or None
        watch = threading.Thread(target=self._watch, args=[within_s, threading.get_ident()], daemon=True)
        watch.start()
        try:
            yield
            self._is_ending = True
        finally:
            self._grace_s = None
            if self.is_requested and self._ending_since_s is None:
                self._ending_since_s = time.monotonic()
            self._to_watch.put(None)
            watch.join(_SAME_S)  # its line precedes those on how the run ended

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """Interrupt the block with RoundCut when the grace period ends, or at once if it has ended
        already."""
        if self._late_since_s is not None:
            raise RoundCut
        self._cuttable += 1
        try:
            yield
        except KeyboardInterrupt as error:
            if self._late_since_s is not None and not self._is_ending:
                raise RoundCut from error  # Ray's calls raise its base class in its place
            raise
        finally:
            self._cuttable -= 1

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """The block, an update or a save, is finished, however late it is."""
        self._finishing += 1
        try:
            yield
        finally:
            self._finishing -= 1

    def check_time(self, needed_s: float | None) -> None:
        """Raise RoundCut if a stop is requested and less than `needed_s` seconds of the grace period are
        left. None means unknown, and counts as too little."""
        if self.is_requested and (
            needed_s is None or time.monotonic() + needed_s > self._since_s + (self._grace_s or 0.0)
        ):
            raise RoundCut

    def _watch(self, within_s: float, thread: int) -> None:
        """Wait for the first signal, log what it leads to, and interrupt `thread` `within_s` seconds later,
        also in a blocking call. The signal is sent until the handler has cut the round: one that comes just
        before such a call does not interrupt it, and a context manager must not be interrupted."""
        if (number := self._to_watch.get()) is None:
            return
        logger.warning(
            "%s: stopping with a checkpoint within %g s, or after the update in progress; send it again to "
            "stop immediately",
            signal.Signals(number).name,
            within_s,
        )
        with suppress(queue.Empty):
            self._to_watch.get(timeout=max(0.0, self._since_s + within_s - time.monotonic()))
            return
        self._late_since_s, self._cut_is_due = time.monotonic(), True
        while self._cut_is_due:
            self._sent_at_s = time.monotonic()
            self.num_sent += 1
            signal.pthread_kill(thread, number)
            with suppress(queue.Empty):
                self._to_watch.get(timeout=_AGAIN_S)
                return


def _is_in_context_manager(frame: FrameType | None) -> bool:
    """Whether a context manager is being entered or left. Interrupted there, it may stay entered: PyTorch's
    inference_mode did, for the rest of the process."""
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


_listening: list[StopSignals] = []


@contextmanager
def stop_signals(*, ends_process: bool = False) -> Iterator[StopSignals]:
    """Handle signals of this process within the block; nested blocks share one object. Signals that were
    ignored before, as under nohup, stay ignored. Outside the main thread, the only one that handles signals,
    the object has no effect. With `ends_process` the process is ended where it does not end by itself (see
    last_resort)."""
    if _listening:
        yield _listening[0]
        return
    stop = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[int, Any] = {n: signal.getsignal(n) for n in NUMBERS}
    heeded = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    _listening.append(stop)
    for number in heeded:
        signal.signal(number, stop.on_signal)
    try:
        with last_resort(stop, heeded, same_s=_SAME_S) if ends_process else nullcontext():
            yield stop
    finally:
        for number, handler in heeded.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _listening.clear()


@contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """Hold back signals during the block; yields the list of those received, for the caller to handle. The
    previous handlers are restored at the end, even if the block installs others. Does nothing outside the
    main thread, the only one that handles signals."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, lambda got, _: caught.append(got)) for number in NUMBERS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
