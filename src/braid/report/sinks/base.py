"""The protocol of metric sinks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Receives the metrics of each round. A sink that raises is removed for the rest of the run; only a
    ReportError, as raised by metrics.jsonl, ends the run, and StopTraining after the round."""

    name: str
    """Display name in messages."""

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        """Write the metrics of a round, under declared names. Values may be nan or infinite."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tracker:
    """Settings of an experiment tracker; fields as in config.report, with `name` filled in. `config` is the
    run config to show next to the curves."""

    project: str
    name: str
    mode: str
    config: dict[str, Any] = field(default_factory=dict)


def run_id(file: Path) -> str:
    """Return the tracker's id of the run, stored in `file`, so that a resumed run continues the same one."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12], "utf-8")
    return file.read_text("utf-8")
