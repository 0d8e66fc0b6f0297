"""The config language of RLinf: a table of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .table import Dialect, Source, table


def _base(source: Source) -> Mapping[str, Any]:  # noqa: ARG001
    return {}


RLINF = Dialect(
    name="rlinf",
    title="RLinf",
    marks=frozenset(
        [
            "cluster",
            "runner",
            "algorithm",
            "actor",
            "rollout",
            "critic",
            "reward",
            "inference",
            "env",
            "hydra",
            "defaults",
        ]
    ),
    rules=table(),
    base=_base,
)
