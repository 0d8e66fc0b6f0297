"""The run folder: its selection, its layout, and rewinding it to a checkpoint's round.

    config.yaml  plan.json  metrics.jsonl  summary.json
    samples/  video/  batches/  checkpoints/  exports/  tensorboard/

docs/run_directory.md describes each file for other tools. braid.checkpoint writes the checkpoints,
sinks.jsonl writes metrics.jsonl.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import secrets
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from braid.errors import ConfigError, Problem, ReportError, disk_fix
from braid.json_text import parse_json

from .files import lock, to_json, write_atomically

logger = logging.getLogger(__name__)

WORTH_KEEPING = ("metrics.jsonl", "checkpoints/*step_*")
"""Glob patterns of files that mark a folder as holding a run; a folder without them is left from a failed
start, and is reused."""


class RunGoesOn(ConfigError):
    """Another process is using the run folder."""


class RunDir:
    """A run folder, locked by this process until `close`.

    Raises ConfigError when another process holds the lock, or the folder cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.samples = path / "samples"
        self.videos = path / "video"
        self.memory = path / "memory"
        self.checkpoints = path / "checkpoints"
        self.exports = path / "exports"
        self.batches = path / "batches"
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            self._release = weakref.finalize(self, os.close, lock(path / ".lock"))
        except BlockingIOError:
            message = (
                f"the run in {path} is in use by another process; wait for it to finish, or choose another "
                "name"
            )
            raise RunGoesOn([Problem("run.name", message, "file system")]) from None
        except OSError as error:
            raise _problem(
                "run.output_dir", f"cannot use the folder {path} for the run: {error.strerror}"
            ) from error

    @classmethod
    def open(cls, parent: Path, name: str, *, if_exists: Literal["refuse", "new"], resume: bool) -> RunDir:
        """Open the folder `parent/name` for a new run, or for the existing one if `resume`.

        If it already holds a run that is not resumed, `if_exists="new"` takes the first free of name-2,
        name-3, ..., and "refuse" raises ConfigError.
        """
        path = parent / name
        if resume:
            return cls(path)
        if if_exists == "new":
            for number in itertools.count(1):
                free = parent / (name if number == 1 else f"{name}-{number}")
                with suppress(RunGoesOn):  # a run that has written nothing yet
                    if not holds_run(free):
                        return cls(free)
        if holds_run(path):
            raise _problem(
                "run.name",
                f"{path} already contains a run; set run.resume=latest to resume it, or run.if_exists=new "
                "(or another run.name) to start a new one, or delete the folder",
            )
        return cls(path)

    @property
    def run_id(self) -> str:
        """Unique id of this run, even among runs of the same name; created on first use."""
        path = self.path / ".run_id"
        if not path.exists():
            self._write(path, secrets.token_hex(8))
        return path.read_text()

    def take_id(self, run_id: str) -> None:
        """Take the run id of the folder's own checkpoints, if it has none: it was copied without hidden
        files."""
        path = self.path / ".run_id"
        if not path.exists():
            self._write(path, run_id)

    def forget_id(self) -> None:
        """Delete the run id, when the folder is reused for a new run."""
        (self.path / ".run_id").unlink(missing_ok=True)

    def describe(self, config_yaml: str, plan: dict[str, Any], kept: Mapping[str, str] | None = None) -> None:
        """Write the resolved config (YAML), the plan, and further texts by file name."""
        self._write(self.config, config_yaml)
        self._write(self.plan, to_json(plan, indent=2) + "\n")
        for name, text in (kept or {}).items():
            self._write(self.path / name, text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write(self.summary, to_json(summary, indent=2) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read the lines of metrics.jsonl; none if there is no such file."""
        return read_metrics(self.metrics) if self.metrics.exists() else []

    def rewind(self, last_round: int | None, stored_round: int | None = None) -> None:
        """Remove everything written after `last_round`; None: all rounds. Samples and batches up to
        `stored_round` stay.

        The resumed run writes them again, so that its files end up as those of an uninterrupted run.
        """
        kept = [r for r in self.read_metrics() if last_round is not None and r["round"] <= last_round]
        if self.metrics.exists():
            self._write(self.metrics, "".join(to_json(record) + "\n" for record in kept))
        for path in (*self.samples.glob("*.jsonl"), *self.batches.glob("*.*")):
            match = re.fullmatch(r"\w+?_(\d+)", path.stem)
            last = max((r for r in (last_round, stored_round) if r is not None), default=-1)
            if match and int(match[1]) > last:
                path.unlink()

    def close(self) -> None:
        """Release the lock on the folder."""
        self._release()

    def _write(self, path: Path, text: str) -> None:
        try:
            write_atomically(path, [text], is_private=path != self.metrics)
        except OSError as error:
            raise ReportError(
                f"cannot write {path}: {error.strerror}; the file is unchanged; {disk_fix(error)}"
            ) from error


def holds_run(path: Path) -> bool:
    """Whether the folder has files of a run that a new run would destroy."""
    return any(next(path.glob(pattern), None) is not None for pattern in WORTH_KEEPING)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl. Invalid lines (partly written when a run was killed) are skipped with
    a warning. Raises OSError."""
    lines = file.read_text("utf-8", errors="replace").splitlines()
    return [record for line in lines if (record := _parse(line)) is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("round"), int):
        logger.warning("skipped an invalid line of metrics.jsonl: %.60r", line)
        return None
    return record


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(key, message, "file system")])
