"""The protocol of a sink: where a round's metrics go."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Takes one line of metrics a round. A sink that raises is closed and left out of the rest of the run, except
    metrics.jsonl's, whose ReportError ends it."""

    name: str
    """What messages call it."""

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        """Write what was measured in one round, under declared names. Values may be nan or infinite."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tracker:
    """Where an experiment tracker is to put a run; fields as in config.report, `name` filled in. `config` is shown beside the
    curves."""

    project: str
    name: str
    mode: str
    config: dict[str, Any] = field(default_factory=dict)


def run_id(file: Path) -> str:
    """The id under which a tracker knows a run, so that a resumed one goes on under it. Kept in `file`."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12], "utf-8")
    return file.read_text("utf-8")
