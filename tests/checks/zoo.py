"""Bugs of public RL frameworks, each as one patch of braid, with the check that must notice it.

A bug's `scenario` are overrides of the tiny config (tests/trainer/conftest.py) in which it has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import braid.algorithms.advantages.grpo as grpo
import braid.rollout.rows as rows
from braid.models.logprobs import Head
from braid.types import CheckName, Row

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bug:
    """`source` is a public issue with the bug, `check` the one that notices it. `resumed` are overrides of a
    second start, for bugs of resumes."""

    source: str
    check: CheckName
    patch: Patch
    scenario: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()


def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """A patch that replaces `owner.name` by `make` of it."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return patch


def with_row(change: Callable[[Row], Row]) -> Patch:
    """A patch of the row that a conversation becomes."""
    return wrapped(rows, "_text_row", lambda make: lambda turns, agent: change(make(turns, agent)))


def _shifted_logprobs(row: Row) -> Row:
    written = row.fields["behavior_logprobs"][row.mask]
    row.fields["behavior_logprobs"][row.mask] = np.roll(written, 1)
    return row


BUGS: Mapping[str, Bug] = {
    "log-probs of the position before": Bug(
        "prime-rl#1525", "sampler_logprobs", with_row(_shifted_logprobs), ("rollout.sampling.max_new_tokens=4",)
    ),
    "the trainer ignores the temperature": Bug(
        "TRL#3029",
        "sampler_logprobs",
        wrapped(Head, "scaled", lambda scaled: lambda head, raw, temperature=1.0: scaled(head, raw)),
        ("rollout.sampling.temperature=0.6",),
    ),
    "trajectories compared with those of other prompts": Bug(
        "verl#2185",
        "group_advantages",
        wrapped(
            grpo,
            "group_advantages",
            lambda compute: lambda rewards, groups, **kwargs: compute(rewards, groups.roll(3), **kwargs),
        ),
    ),
}  # fmt: skip
