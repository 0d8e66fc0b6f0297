"""The config language of SkyRL: a table of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .table import Dialect, Source, table


def _base(source: Source) -> Mapping[str, Any]:  # noqa: ARG001
    return {}


SKYRL = Dialect(
    name="skyrl",
    title="SkyRL",
    marks=frozenset(["trainer", "generator", "data", "deepspeed_config", "environment"]),
    rules=table(),
    base=_base,
)
