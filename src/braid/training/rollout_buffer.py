"""The rollout buffer: the rows of a round, between the rollout workers that make them and the ranks that
train.

    rollout workers ─rows─> RolloutBuffer ─shares of rows─> ranks ─log-probs, values─> RolloutBuffer
    ─mini-batches─> ranks

A plain object in a worker group: in the driver's process, or in separate ones, in which case the driver
(trainer.buffer) handles only references and RowMetadata. Each process holds the whole trajectories of some
rollout workers. Numbers that depend on all rows are computed in the first process, to which the others lend
their rows without inputs and observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braid.algorithms.recipes import Recipe
from braid.algorithms.rewards import RunningMoments
from braid.models.base import Output
from braid.types import Row, RowMetadata, is_at_least

from .advantages import compute_advantages
from .step_fields import write_step_fields


class RolloutBuffer:
    """The rows of one round in one process."""

    def __init__(self, recipe: Recipe, constant: float | None, shard: int = 0) -> None:
        """`constant` is the denominator of token_sum_constant."""
        self._recipe, self._constant, self._shard = recipe, constant, shard
        self._rows: list[Row] = []
        self._lent: list[list[Row]] = []

    def open(self, pieces: Sequence[Sequence[Row]]) -> list[RowMetadata]:
        """Replace the rows of the last round. Rows are sorted by trajectory, so results do not depend on
        which worker made which; those of one trajectory stay in order."""
        self._rows = sorted((row for piece in pieces for row in piece), key=lambda row: row.trajectory)
        return [row.metadata(self._shard, i) for i, row in enumerate(self._rows)]

    def take(self, indices: Sequence[int], is_bare: bool) -> list[Row]:
        """The current rows; without fields if `is_bare`, since a forward pass does not read them."""
        rows = [self._rows[i] for i in indices]
        return [replace(row, fields={}) for row in rows] if is_bare else rows

    def first(self, is_bare: bool) -> Row:
        """A row for ranks that have none, which take part in a pass without contributing."""
        return self.take([0], is_bare)[0]

    def merge(
        self,
        fields: Mapping[Output, str],
        places: Sequence[tuple[int, int, int]],
        results: Sequence[Sequence[Mapping[Output, NDArray[Any]]]],
    ) -> None:
        """Write a model's outputs, by share, into these fields of rows: (index, share, place in the share) of
        each. The experts that it chose become an input of the rows."""
        for index, share, place in places:
            for output, field in fields.items():
                row = self._rows[index]
                (row.inputs if output == "experts" else row.fields)[field] = results[share][place][output]

    def compare_fields(self, first: str, second: str) -> dict[str, float]:
        """Remove the log-probs in two fields of the rows that have them, and return the sums of
        checks.packing over them."""
        sums = {"packed_tokens": 0.0, "packed_k3": 0.0}
        for row in self._rows:
            if first in row.fields:
                a, b = (row.fields.pop(name)[row.mask].astype(np.float64) for name in (first, second))
                d = (a - b).clip(-20, 20)
                sums["packed_tokens"] += len(d)
                sums["packed_k3"] += float((np.expm1(d) - d).sum())
        return sums

    def copy_field(self, source: str, target: str) -> None:
        """Give every row the field `target`, the same as `source`."""
        for row in self._rows:
            row.fields[target] = row.fields[source]

    def write_policy_versions(self) -> None:
        """Write the field `policy_versions`, for the policy loss."""
        for row in self._rows:
            row.fields["policy_versions"] = row.policy_versions.astype(np.float32)

    def weigh_kl(self, weights: Mapping[str, float]) -> None:
        """Write the field `kl_weights`: by the source of each row, the factor of its KL."""
        for row in self._rows:
            row.fields["kl_weights"] = np.full(len(row), weights[row.source], np.float32)

    def mark_successes(self, least: float) -> None:
        """Write the field `is_success` of each row: 1 at all positions of a row whose score is at least this,
        else 0."""
        for row in self._rows:
            row.fields["is_success"] = np.full(len(row), is_at_least(row.score, least), np.float32)

    def lend(self) -> list[Row]:
        """The rows for the first process, without inputs and observations unless they are anchor states
        (GiGPO)."""
        if self._recipe.advantage.reads_observations:
            return self._rows
        return [replace(row, inputs={}, observations={}) for row in self._rows]

    def borrow(self, lent: Sequence[list[Row]]) -> None:
        """Take the rows of the other processes into account."""
        self._lent = list(lent)

    def give_back(self, lender: int) -> list[dict[str, NDArray[np.floating]]]:
        """The fields of the rows of the process `lender`, as they are now."""
        return [row.fields for row in self._lent[lender]]

    def take_back(self, fields: Sequence[dict[str, NDArray[np.floating]]]) -> None:
        """Replace the fields of all rows."""
        for row, row_fields in zip(self._rows, fields, strict=True):
            row.fields = row_fields

    def compute_advantages(
        self, kl_coef: float, running: RunningMoments
    ) -> tuple[dict[str, float], RunningMoments, dict[str, float]]:
        """See advantages.compute_advantages, over the rows of all processes. Returns its metrics, `running`
        updated with this round's rewards, and the sums for the checks of the loop."""
        rows = sorted(
            (row for part in (self._rows, *self._lent) for row in part), key=lambda row: row.trajectory
        )
        sums: dict[str, float] = {}
        metrics = compute_advantages(rows, self._recipe, kl_coef=kl_coef, running=running, sums=sums)
        return metrics, running, sums

    def write_step_fields(self, places: Sequence[tuple[int, int]], key: tuple[int, ...]) -> None:
        """See step_fields.write_step_fields; for the rows of one step: (process, index) of each."""
        held = (self._rows, *self._lent)
        rows = [held[shard][index] for shard, index in places]
        write_step_fields(rows, self._recipe, constant=self._constant, key=key)
