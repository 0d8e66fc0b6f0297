"""Handling of SIGINT (Ctrl-C), SIGTERM and SIGHUP: graceful stops, and blocks that signals cannot
interrupt."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_SAME_S = 0.5
"""Further signals within this time, in seconds, count as the same request: a key held down, or a wrapper that
forwards a signal that the terminal has also sent."""
_AGAIN_S = 0.01
"""After this time a round is cut that could not be cut safely, in seconds."""


class RoundCut(KeyboardInterrupt):
    """The round cannot finish within the grace period after a signal."""


class StopSignals:
    """Signal handling of the run in this process. A signal raises KeyboardInterrupt, once; while the process
    shuts down, further signals are ignored. Within `graceful` the first signal only sets `is_requested`, and
    the next one raises."""

    def __init__(self) -> None:
        self.is_requested = False
        self._is_ending = False
        self._is_late = False
        self._grace_s: float | None = None
        self._since_s = 0.0
        self._cuttable = 0
        self._timer: threading.Timer | None = None
        self._notice: threading.Thread | None = None

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal that interrupted `frame`."""
        if self._is_ending:
            return
        if self._is_late and self._timer is not None:  # sent by the timer
            if _is_in_context_manager(frame):
                self._start_timer(number, _AGAIN_S)
                return
            self._timer = None
            if self._cuttable:
                raise RoundCut
        elif self._grace_s is None:
            self.end()
        elif not self.is_requested:
            self._request(number, self._grace_s)
        elif time.monotonic() - self._since_s > _SAME_S:
            self.end()

    def end(self) -> NoReturn:
        """Raise KeyboardInterrupt, and ignore further signals."""
        self._is_ending = True
        raise KeyboardInterrupt

    @contextmanager
    def graceful(self, within_s: float) -> Iterator[None]:
        """After the first signal, give the block `within_s` seconds to finish; with 0 the signal raises
        KeyboardInterrupt at once. After the block signals are ignored, since the run is over."""
        self._grace_s = within_s or None
        try:
            yield
            self._is_ending = True
        finally:
            self._grace_s = None
            if self._timer is not None:
                self._timer.cancel()
            if self._notice is not None:  # so that its line precedes those on how the run ended
                self._notice.join(_SAME_S)

    @contextmanager
    def cuttable(self) -> Iterator[None]:
        """Interrupt the block with RoundCut when the grace period ends, or at once if it has ended
        already."""
        if self._is_late:
            raise RoundCut
        self._cuttable += 1
        try:
            yield
        finally:
            self._cuttable -= 1

    def check_time(self, needed_s: float | None) -> None:
        """Raise RoundCut if a stop is requested and less than `needed_s` seconds of the grace period are
        left. None means unknown, and counts as too little."""
        if self.is_requested and (
            needed_s is None or time.monotonic() + needed_s > self._since_s + (self._grace_s or 0.0)
        ):
            raise RoundCut

    def _request(self, number: int, within_s: float) -> None:
        self.is_requested, self._since_s = True, time.monotonic()
        self._start_timer(number, within_s)
        name = signal.Signals(number).name
        # Logged in another thread: a handler must not wait for a lock held by the code that it interrupted.
        self._notice = threading.Thread(
            target=logger.warning,
            args=(
                "%s: stopping with a checkpoint within %g s, or after the update in progress; send it again to stop immediately",
                name,
                within_s,
            ),
            daemon=True,
        )
        self._notice.start()

    def _start_timer(self, number: int, within_s: float) -> None:
        self._timer = threading.Timer(within_s, self._be_late, [number])
        self._timer.daemon = True
        self._timer.start()

    def _be_late(self, number: int) -> None:
        """Mark the grace period as over, and interrupt a blocking call of the main thread."""
        self._is_late = True
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, number)


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
def stop_signals() -> Iterator[StopSignals]:
    """Handle signals of this process within the block; nested blocks share one object. Signals that were
    ignored before, as under nohup, stay ignored. Outside the main thread, the only one that handles signals,
    the object has no effect."""
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
