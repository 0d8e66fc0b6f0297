"""The folder of a run: which one it is, what lies where, and going back to a checkpoint's round.

    config.yaml  plan.json  metrics.jsonl  summary.json  samples/  batches/  checkpoints/  exports/  tensorboard/

docs/run_directory.md describes each file for other tools. Checkpoints are written by checkpoint/, metrics.jsonl by its
sink.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import secrets
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from braid.errors import ConfigError, Problem, ReportError

from .files import lock, to_json, write_atomically

logger = logging.getLogger(__name__)

WORTH_KEEPING = ("metrics.jsonl", "checkpoints/*step_*")
"""A folder with one of these (glob patterns) holds a run; one without is of a start that failed, and is used again."""


class RunGoesOn(ConfigError):
    """Another process works in the folder."""


class RunDir:
    """A run's folder, held by this process until `close`.

    Raises ConfigError when another process holds it, or when it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            self._release = weakref.finalize(self, os.close, lock(path / ".lock"))
        except BlockingIOError:
            raise RunGoesOn(
                [
                    Problem(
                        "run.name",
                        f"the run in {path} is still going on in another process; wait for it, or give another name",
                        "file system",
                    )
                ]
            ) from None
        except OSError as error:
            raise _problem(
                "run.output_dir", f"the folder {path} cannot be used for the run: {error.strerror}"
            ) from error

    @classmethod
    def open(cls, parent: Path, name: str, *, if_exists: Literal["refuse", "new"], resume: bool) -> RunDir:
        """The folder `parent/name` for a new run, or to go on with one when `resume`.

        Raises ConfigError when it holds a run that is neither resumed nor to be left alone (`if_exists` new, which
        takes the first free of name-2, name-3, ...).
        """
        path = parent / name
        if resume:
            return cls(path)
        if if_exists == "new":
            for number in itertools.count(1):
                free = parent / (name if number == 1 else f"{name}-{number}")
                with suppress(RunGoesOn):  # of a run that has written nothing yet
                    if not holds_run(free):
                        return cls(free)
        if holds_run(path):
            raise _problem(
                "run.name",
                f"{path} holds a run already. To go on with it, set run.resume=latest; to keep it and start beside it, "
                f"set run.if_exists=new or another run.name; or delete the folder",
            )
        return cls(path)

    @property
    def run_id(self) -> str:
        """What tells this run from others, also from those of the same name; made when it is first asked for."""
        path = self.path / ".run_id"
        if not path.exists():
            self._write(path, secrets.token_hex(8))
        return path.read_text()

    def forget_id(self) -> None:
        """The folder is used for a new run."""
        (self.path / ".run_id").unlink(missing_ok=True)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def memory(self) -> Path:
        return self.path / "memory"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    def describe(self, config_yaml: str, plan: dict[str, Any], kept: Mapping[str, str] | None = None) -> None:
        """Write what the run is to do: the resolved config as YAML, its plan, and further texts by file name."""
        self._write(self.config, config_yaml)
        self._write(self.plan, to_json(plan, indent=2) + "\n")
        for name, text in (kept or {}).items():
            self._write(self.path / name, text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write(self.summary, to_json(summary, indent=2) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. A line that is no JSON (half-written when a run was killed) is left out."""
        try:
            lines = self.metrics.read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [record for line in lines if (record := _parse(line)) is not None]

    def rewind(self, last_round: int | None, stored_round: int | None = None) -> None:
        """Take back everything that was written after `last_round`; None is before the first line. Samples and batches of
        `stored_round` stay.

        The run that goes on from there writes it anew, so that its files end up as those of a run never broken off.
        """
        kept = [r for r in self.read_metrics() if last_round is not None and r["round"] <= last_round]
        if self.metrics.exists():
            self._write(self.metrics, "".join(to_json(record) + "\n" for record in kept))
        for path in (*self.samples.glob("*.jsonl"), *self.batches.glob("*.*")):
            found = re.fullmatch(r"\w+?_(\d+)", path.stem)
            last = max((r for r in (last_round, stored_round) if r is not None), default=-1)
            if found and int(found[1]) > last:
                path.unlink()

    def close(self) -> None:
        """Let other processes use the folder."""
        self._release()

    def _write(self, path: Path, text: str) -> None:
        try:
            write_atomically(path, [text], is_private=path != self.metrics)
        except OSError as error:
            raise ReportError(f"cannot write {path}: {error.strerror}; the file is as it was") from error


def holds_run(path: Path) -> bool:
    """Whether the folder has something of a run that a new one would destroy."""
    return any(next(path.glob(pattern), None) is not None for pattern in WORTH_KEEPING)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("round"), int):
        logger.warning("left out a line of metrics.jsonl that is no record of a round: %.60r", line)
        return None
    return record


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(key, message, "file system")])
