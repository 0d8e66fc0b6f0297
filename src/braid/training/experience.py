"""The rows of a round, wherever they lie: between the rollout that makes them and the ranks that learn from them.

    rollout workers ─rows─> Experience ─shares of rows─> ranks ─log-probs, values─> Experience ─mini-batches─> ranks

A plain object in a worker group of one: in the controller's process, or in one of its own, where the controller passes
references on and sees RowFacts. Owns the arrays; which rows make a mini-batch or a share is decided by facts alone
(controller.steps, training.group).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from braid.algorithms.recipes import Recipe
from braid.algorithms.rewards import RunningMoments
from braid.models.base import Output
from braid.types import Row

from .credit import assign_credit
from .group import bare
from .step_fields import write_step_fields


@dataclass(slots=True)  # frozen ones are slow to send, and there is one for each row
class RowFacts:
    """What is known of a row without its arrays: `index` is its place in the Experience; the others as in Row."""

    index: int
    length: int
    num_tokens: int
    group: int
    trajectory: int
    is_truncated: bool

    def __len__(self) -> int:
        return self.length


class Experience:
    """The rows of one round."""

    def __init__(self, recipe: Recipe, constant: float | None) -> None:
        """`constant` is that of token_sum_constant."""
        self._recipe, self._constant = recipe, constant
        self._rows: list[Row] = []

    def open(self, pieces: Sequence[Sequence[Row]]) -> list[RowFacts]:
        """Take in a round's rows, in place of those of the last. They are put into the order of their trajectories, so that it
        does not matter who made which."""
        self._rows = sorted((row for piece in pieces for row in piece), key=lambda row: row.trajectory)
        return [
            RowFacts(i, len(row), row.num_tokens, row.group, row.trajectory, row.is_truncated)
            for i, row in enumerate(self._rows)
        ]

    def take(self, indices: Sequence[int], is_bare: bool) -> list[Row]:
        """Rows as they are now; bare of the fields, which a forward pass does not read."""
        rows = [self._rows[i] for i in indices]
        return [bare(row) for row in rows] if is_bare else rows

    def spare(self, is_bare: bool) -> Row:
        """A row that stands in where a rank has none of its own."""
        return self.take([0], is_bare)[0]

    def merge(
        self,
        output: Output,
        field: str,
        shares: Sequence[Sequence[int]],
        results: Sequence[Sequence[Mapping[Output, NDArray[np.float32]]]],
    ) -> None:
        """Write what a model has inferred, by share, into `field` of the rows that the shares name."""
        for indices, share in zip(shares, results, strict=True):
            for index, result in zip(indices, share, strict=True):
                self._rows[index].fields[field] = result[output]

    def copy_field(self, source: str, target: str) -> None:
        """Give every row the field `target`, the same as `source`."""
        for row in self._rows:
            row.fields[target] = row.fields[source]

    def mark_successes(self, is_success: Sequence[bool]) -> None:
        """Write `is_success` of each row: 1 throughout where it is one."""
        for row, value in zip(self._rows, is_success, strict=True):
            row.fields["is_success"] = np.full(len(row), value, np.float32)

    def assign_credit(
        self, kl_coef: float, running: RunningMoments
    ) -> tuple[dict[str, float], RunningMoments]:
        """See credit.assign_credit. Returns its facts, and `running` with this round's rewards in it."""
        facts = assign_credit(self._rows, self._recipe, kl_coef=kl_coef, running=running)
        return facts, running

    def write_step_fields(self, indices: Sequence[int], key: tuple[int, ...]) -> None:
        """See step_fields.write_step_fields, of the rows of one step."""
        rows = [self._rows[i] for i in indices]
        write_step_fields(rows, self._recipe, constant=self._constant, key=key)
