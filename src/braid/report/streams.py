"""Standard streams of a run: errors in printing never end it, and output of reward functions goes to a
file."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, TextIO

logger = logging.getLogger(__name__)

REWARD_THREADS = "braid-reward"
"""Name prefix of the threads that run users' reward functions."""


class Forgiving:
    """A text stream that drops text it cannot write, because the disk is full or the terminal or pipe is
    closed. Characters that its encoding lacks become question marks."""

    def __init__(self, stream: TextIO, *, only_encoding: bool = False) -> None:
        """With `only_encoding`, only encoding errors are suppressed."""
        self._stream = stream
        self._forgiven = () if only_encoding else (OSError, ValueError)  # ValueError: the stream is closed

    def write(self, text: str) -> int:
        with suppress(*self._forgiven):
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(*self._forgiven):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def forgiven(name: Literal["stdout", "stderr"], *, only_encoding: bool = False) -> Iterator[None]:
    """Make a standard stream Forgiving within the block. One that was closed at process start becomes the
    null device."""
    before = getattr(sys, name)
    with nullcontext(before) if before is not None else open(os.devnull, "w", encoding="utf-8") as stream:
        setattr(sys, name, Forgiving(stream, only_encoding=only_encoding))
        try:
            yield
        finally:
            setattr(sys, name, before)


class _Sorted:
    """A text stream that redirects the output of reward threads to the file `log`; the first redirection is
    logged."""

    def __init__(self, stream: Any, log: Path | None) -> None:
        self._stream, self._log, self._is_told = stream, log, False
        self._started: dict[int, str] = {}
        """The line that each thread has begun: several print at the same time."""

    def write(self, text: str) -> int:
        if not threading.current_thread().name.startswith(REWARD_THREADS):
            return self._stream.write(text)
        if self._log is None:
            return len(text)
        thread = threading.get_ident()
        lines, newline, self._started[thread] = (self._started.pop(thread, "") + text).rpartition("\n")
        if not newline:
            return len(text)
        with suppress(OSError):  # a full disk must not fail the reward
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("a", encoding="utf-8", errors="replace") as file:
                file.write(lines + newline)
        if not self._is_told:
            self._is_told = True
            logger.info("a reward writes to stdout; its output is redirected to %s", self._log)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def reward_prints_in(log: Path | None) -> Iterator[None]:
    """Redirect what reward functions print in this process to the file `log` within the block; None discards
    it."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    ours = {name: _Sorted(stream, log) for name, stream in before.items()}
    for name, stream in ours.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in ours.items():
            # Else the display was closed meanwhile, which restored those before it.
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])
