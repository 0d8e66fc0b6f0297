"""The config language of ROLL: a table of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .table import Dialect, Source, table


def _base(source: Source) -> Mapping[str, Any]:  # noqa: ARG001
    return {}


ROLL = Dialect(
    name="roll",
    title="ROLL",
    marks=frozenset(
        [
            "rollout_batch_size",
            "prompt_length",
            "response_length",
            "actor_train",
            "actor_infer",
            "reference",
            "pretrain",
            "num_return_sequences_in_group",
        ]
    ),
    rules=table(),
    base=_base,
)
