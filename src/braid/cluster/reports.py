"""What a worker reports to its driver between calls: warnings and errors of its log, and that it cannot
continue."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAX_TEXT = 2000
"""Characters to which a report is cut; the worker's log has the full text."""


class Report(NamedTuple):
    """A log record; with level None the reason why the worker cannot continue, though its process is
    alive."""

    level: int | None
    text: str


_made: queue.SimpleQueue[Report] = queue.SimpleQueue()


def reports() -> Iterator[Report]:
    """Yield this process's reports as they are made."""
    while True:
        yield _made.get()


def give_up(why: str) -> None:
    """Have the driver fail the run at once, and not at the next call. Does nothing in the driver's
    process."""
    _made.put(Report(None, why[:_MAX_TEXT]))


def log_to(file: Path | None) -> None:
    """Log records from INFO on to standard error, and report warnings and errors. With `file`, standard
    output and error of this process and its children go there."""
    if file is not None:
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(number, 1)
        os.dup2(number, 2)
        os.close(number)
    written = logging.StreamHandler()
    written.setLevel(logging.INFO)
    written.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(capture=True)
    logging.getLogger().addHandler(written)
    logging.getLogger().addHandler(_Reporting(logging.WARNING))
    logging.getLogger("braid").setLevel(logging.INFO)


class _Reporting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.name == "py.warnings":  # the first line is the message, then comes the source text
                text = text.splitlines()[0]
            _made.put(Report(record.levelno, text[:_MAX_TEXT]))
        except Exception:  # by the contract of logging handlers: a broken message must not end the run
            self.handleError(record)
