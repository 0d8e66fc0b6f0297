"""The protocol of metric sinks."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives the metrics of each round. A sink that raises is removed for the rest of the run; only a
    ReportError, as raised by metrics.jsonl, ends the run, and StopTraining after the round."""

    name: str
    """Display name in messages."""

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        """Write the metrics of a round, under declared names. Values may be nan or infinite."""
        ...

    def close(self) -> None: ...


class SampleRow(NamedTuple):
    """A trajectory as a row of a table."""

    uid: str
    prompt: str
    answer: str
    reward: float | None
    status: str


@runtime_checkable
class ShowsSamples(Protocol):
    """A sink that also shows trajectories, at most `num_samples` at a time."""

    num_samples: int

    def log_samples(self, use: str, round_: int, samples: Sequence[SampleRow]) -> None:
        """Show trajectories of a round (`use` is train) or of the evaluation after it (eval)."""
        ...


@dataclass(frozen=True, slots=True)
class Tracker:
    """Settings of an experiment tracker; fields as in config.report, with `name` filled in. `config` is the
    run config to show next to the curves."""

    project: str
    name: str
    mode: str
    num_samples: int = 0
    config: dict[str, Any] = field(default_factory=dict)


def run_id(file: Path) -> str:
    """The tracker's id of the run, kept in `file` with the folder that it was made in: a resumed run
    continues the same one, also in a folder that was moved. A copy, whose original is still there, gets an id
    of its own: its rounds would be written into the original's curves."""
    folder = file.parent.resolve()
    name, made_in = _read_id(file)
    if name is not None and made_in in (folder, None):
        return name
    original = None if made_in is None else made_in / file.name
    if name is None or (original is not None and _read_id(original)[0] == name):
        name = uuid.uuid4().hex[:12]
        if original is not None:
            logger.warning(
                "%s is a copy of %s: it gets a run of its own in the tracker (%s)", folder, made_in, name
            )
    file.write_text(f"{name}\n{folder}\n", "utf-8")
    return name


def _read_id(file: Path) -> tuple[str | None, Path | None]:
    """The id, and the folder that it was made in, if known."""
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return (lines[0] if lines else None), (Path(lines[1]) if len(lines) > 1 else None)
