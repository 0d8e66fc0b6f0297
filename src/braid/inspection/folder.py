"""Reads run folders for the commands that look at finished or running runs: `braid ls`, `samples`, `compare`
and `diagnose`. Nothing here writes, and nothing needs the model.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from braid.config.source import read_file
from braid.errors import ConfigError, Problem, suggest
from braid.json_text import read_json
from braid.report.run_dir import read_metrics

Stage = Literal["round", "eval"]
"""What samples are of: a round of training, or the evaluation after it."""


@dataclass(frozen=True)
class Run:
    """A run folder as it is now. Files that are missing or cut short read as empty."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty before the first round has ended."""
        try:
            return read_json(self.path / "summary.json")
        except (OSError, ValueError):
            return {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config, with references to variables as they are stored."""
        try:
            return read_file(self.path / "config.yaml").tree
        except ConfigError:
            return {}

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, in order; lines that are cut short are left out."""
        try:
            return read_metrics(self.path / "metrics.jsonl")
        except OSError:
            return []

    @property
    def status(self) -> str:
        """That of summary.json, or `killed` if it says `running` and no process holds the folder."""
        status = str(self.summary.get("status", "running"))
        return "killed" if status == "running" and not self.is_held else status

    @property
    def is_held(self) -> bool:
        """Whether a process works in the folder."""
        try:
            lock = os.open(self.path / ".lock", os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def values(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of a metric where it is a finite number."""
        return [
            (line["round"], float(value))
            for line in self.lines
            if isinstance(value := line.get(name), int | float) and math.isfinite(value)
        ]

    @cached_property
    def target_name(self) -> str | None:
        """The metric of the evaluations over all sources: eval/all/pass@1, else mean@n, else None."""
        pattern = re.compile(r"eval/all/(mean|pass)@\d+")
        names = {name for line in self.lines for name in line if pattern.fullmatch(name)}
        if "eval/all/pass@1" in names and any(value for _, value in self.values("eval/all/pass@1")):
            return "eval/all/pass@1"
        return min((name for name in names if "mean@" in name), default=None)

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """(round, value) of the metric `target_name`; empty without evaluations."""
        return [] if self.target_name is None else self.values(self.target_name)

    def samples(self, stage: Stage) -> dict[int, Path]:
        """Round -> its file in samples/, in order of rounds."""
        matches = (
            (re.fullmatch(rf"{stage}_(\d+)", file.stem), file)
            for file in (self.path / "samples").glob(f"{stage}_*.jsonl")
        )
        return dict(sorted((int(match[1]), file) for match, file in matches if match))

    def samples_of(self, stage: Stage, number: int | None) -> tuple[int, Path]:
        """(round, file) of a round's samples, the last one's if `number` is None. Raises ConfigError with the
        rounds that have samples."""
        files = self.samples(stage)
        what, key = "rounds", "report.samples_every_rounds"
        if stage == "eval":
            what, key = "evaluations", "eval.every_rounds"
        if not files:
            message = f"{self.path} has no samples of {what}; {key} chooses which are stored"
            raise ConfigError([Problem("samples", message, "file system")])
        chosen = max(files) if number is None else number
        if chosen not in files:
            message = f"{self.path} has no samples of round {number}; it has {_ranges(list(files))} ({key})"
            raise ConfigError([Problem("samples", message, "file system")])
        return chosen, files[chosen]


def open_run(path: Path) -> Run:
    """The run in a folder. Raises ConfigError if there is none, with runs of a similar name."""
    if (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file():
        return Run(path)
    if not path.is_dir():
        near = [run.name for run in find_runs(path.parent)] if path.parent.is_dir() else []
        message = f"{path} is not a folder{suggest(path.name, near)}"
    else:
        inside = sum(1 for _ in find_runs(path))
        hint = f"; it holds {inside} runs: pass one of them, or braid ls {path}" if inside else ""
        message = f"{path} has no config.yaml, so it is not a run{hint}"
    raise ConfigError([Problem("RUN", message, "command line")])


def find_runs(folder: Path, depth: int = 3) -> Iterator[Run]:
    """The runs in a folder and in those below it, `depth` levels down, in order of names. A run's own folders
    are not searched."""
    if (folder / "config.yaml").is_file() and (folder / "plan.json").is_file():
        yield Run(folder)
        return
    if depth:
        try:
            below = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
        except OSError:
            return
        for path in below:
            yield from find_runs(path, depth - 1)


def settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Key path -> value of each plain value and each list of a config."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            out |= {f"{key}.{below}": inner for below, inner in settings(value).items()}
        else:
            out[key] = value
    return out


def _ranges(numbers: Sequence[int]) -> str:
    """[10, 20, 30] as "10, 20, 30", and many as "10, 20, ..., 990, 1000"."""
    texts = [str(number) for number in numbers]
    return ", ".join(texts if len(texts) <= 6 else [*texts[:2], "...", *texts[-2:]])
