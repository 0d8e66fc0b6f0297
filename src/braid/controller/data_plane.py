"""Rows on their way between workers: the controller says which go where by their facts, and passes references on.

Its own time grows with the number of rows, never with their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from braid.algorithms.rewards import RunningMoments
from braid.models.base import Output
from braid.plan import Plan
from braid.runtime.workers import Pending, Ref, WorkerGroup
from braid.training.backend import Loss, StepReport
from braid.training.experience import Experience, RowFacts
from braid.training.group import GroupBackend
from braid.types import Row


@dataclass(frozen=True, slots=True)
class DataPlane:
    """The round's rows, in a worker group of one that runs an Experience."""

    workers: WorkerGroup

    def open(self, pieces: Sequence[Ref]) -> list[RowFacts]:
        """Take in the rows of a round: a list of rows behind each reference."""
        return self.workers.call("open", list(pieces))[0]

    def start_infer(
        self, backend: GroupBackend, rows: Sequence[RowFacts], output: Output, field: str
    ) -> Pending:
        """Have `field` of the rows written from what the backend's model gives as `output`. Other models can be at work at
        the same time."""
        shares = backend.shares(rows)
        pieces, spare = self._pieces(rows, shares, is_bare=True)
        results = backend.start_infer(pieces, frozenset({output}), spare)
        return self.workers.start("merge", output, field, _indices(rows, shares), results)

    def train(
        self, backend: GroupBackend, rows: Sequence[RowFacts], weights: Sequence[float], loss: Loss
    ) -> StepReport:
        """One optimizer step over `rows`; `weights` as in TrainingBackend.train."""
        shares = backend.shares(rows)
        pieces, spare = self._pieces(rows, shares, is_bare=False)
        parts = [[weights[i] for i in share] for share in shares]
        return backend.start_train(pieces, parts, loss, spare).wait()[0]

    def copy_field(self, source: str, target: str) -> None:
        """Give all rows the field `target`, the same as `source`."""
        self.workers.call("copy_field", source, target)

    def mark_successes(self, is_success: Sequence[bool]) -> None:
        """Tell of each row whether its reward is a success."""
        self.workers.call("mark_successes", list(is_success))

    def assign_credit(
        self, kl_coef: float, running: RunningMoments
    ) -> tuple[dict[str, float], RunningMoments]:
        """See Experience.assign_credit."""
        return self.workers.call("assign_credit", kl_coef, running)[0]

    def write_step_fields(self, rows: Sequence[RowFacts], key: tuple[int, ...]) -> None:
        """See training.step_fields; `rows` are those of one step."""
        self.workers.start("write_step_fields", [row.index for row in rows], key)

    def whole(self, rows: Sequence[RowFacts]) -> list[Row]:
        """The rows with all their arrays, for reports; this brings them here."""
        return self.workers.call("take", [row.index for row in rows], False)[0]

    def close(self) -> None:
        """End the worker."""
        self.workers.close()

    def _pieces(
        self, rows: Sequence[RowFacts], shares: Sequence[Sequence[int]], *, is_bare: bool
    ) -> tuple[list[Ref], Ref]:
        """References to the rows of each share, and to one that stands in where a rank has none."""
        pieces = [self.workers.start("take", own, is_bare).refs[0] for own in _indices(rows, shares)]
        return pieces, self.workers.start("spare", is_bare).refs[0]


def _indices(rows: Sequence[RowFacts], shares: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[rows[i].index for i in share] for share in shares]


def make_experience(plan: Plan, _: object) -> Experience:
    """What runs in the worker."""
    return Experience(plan.recipe, plan.aggregation_constant)
