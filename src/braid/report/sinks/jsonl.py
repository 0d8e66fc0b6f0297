"""metrics.jsonl: one JSON object a round, the run's own record of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from braid.errors import ReportError
from braid.report.files import to_json


class JsonlSink:
    """Appends to the file; each line is handed to the system whole before `log` returns.

    The file is opened at the first line, so that the run's folder can be rewound before. Raises ReportError when a line
    cannot be written.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(to_json({"round": round_, "step": step, **flat}) + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError):
                self.close()
            raise ReportError(
                f"cannot write round {round_} to {self._path}: {error.strerror}; make room, then go on from the last "
                "checkpoint with run.resume=latest"
            ) from error

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
