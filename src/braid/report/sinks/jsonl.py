"""metrics.jsonl: one JSON object per round, the run's own record of its metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from braid.errors import ReportError, disk_fix
from braid.report.files import to_json


class JsonlSink:
    """Appends to the file; each line is synced to disk when `log` returns. The file is open only during
    `log`, so that the run folder can be rewound. Raises ReportError when a line cannot be written.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(to_json({"round": round_, "step": step, **flat}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ReportError(
                f"cannot write round {round_} to {self._path}: {error.strerror}; {disk_fix(error)}, then "
                "resume with run.resume=latest"
            ) from error

    def close(self) -> None:
        """No file is open between calls of `log`."""
