"""Moves rows between workers: the driver assigns them by their metadata, and forwards only references.

The driver's cost grows with the number of rows, not with their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from braid.algorithms.rewards import RunningMoments
from braid.cluster.workers import Pending, Ref, WorkerGroup
from braid.models.base import Output
from braid.plan import Plan
from braid.training.backend import Loss, StepReport
from braid.training.group import GroupBackend
from braid.training.rollout_buffer import RolloutBuffer, RowMetadata
from braid.types import Row


@dataclass(frozen=True, slots=True)
class DataPlane:
    """The rollout buffer, in a worker group of one that runs an RolloutBuffer."""

    workers: WorkerGroup

    def open(self, pieces: Sequence[Ref]) -> list[RowMetadata]:
        """Store the rows of a round; each reference is to a list of rows. Returns their metadata."""
        return self.workers.call("open", list(pieces))[0]

    def start_infer(
        self, backend: GroupBackend, rows: Sequence[RowMetadata], output: Output, field: str
    ) -> Pending:
        """Start to compute the backend's `output` for the rows and write it to their `field`. Other models
        can run at the same time."""
        shares = backend.shares(rows)
        pieces, spare = self._pieces(rows, shares, is_bare=True)
        results = backend.start_infer(pieces, frozenset({output}), spare)
        return self.workers.start("merge", output, field, _indices(rows, shares), results)

    def train(
        self, backend: GroupBackend, rows: Sequence[RowMetadata], weights: Sequence[float], loss: Loss
    ) -> StepReport:
        """Take one optimizer step on `rows`; `weights` as in TrainingBackend.train."""
        shares = backend.shares(rows)
        pieces, spare = self._pieces(rows, shares, is_bare=False)
        parts = [[weights[i] for i in share] for share in shares]
        return backend.start_train(pieces, parts, loss, spare).wait()[0]

    def copy_field(self, source: str, target: str) -> None:
        """Copy field `source` to `target` in all rows."""
        self.workers.call("copy_field", source, target)

    def write_policy_versions(self) -> None:
        """See RolloutBuffer.write_policy_versions."""
        self.workers.call("write_policy_versions")

    def mark_successes(self, is_success: Sequence[bool]) -> None:
        """Mark for each row whether its reward is a success."""
        self.workers.call("mark_successes", list(is_success))

    def compute_advantages(
        self, kl_coef: float, running: RunningMoments
    ) -> tuple[dict[str, float], RunningMoments]:
        """See RolloutBuffer.compute_advantages."""
        return self.workers.call("compute_advantages", kl_coef, running)[0]

    def write_step_fields(self, rows: Sequence[RowMetadata], key: tuple[int, ...]) -> None:
        """Write the fields of training.step_fields to the `rows` of one step."""
        self.workers.call("write_step_fields", [row.index for row in rows], key)

    def whole(self, rows: Sequence[RowMetadata]) -> list[Row]:
        """The rows with all arrays, for reports; copies them into this process."""
        return self.workers.call("take", [row.index for row in rows], False)[0]

    def close(self) -> None:
        """Stop the worker."""
        self.workers.close()

    def _pieces(
        self, rows: Sequence[RowMetadata], shares: Sequence[Sequence[int]], *, is_bare: bool
    ) -> tuple[list[Ref], Ref]:
        """References to the rows of each share, and to a placeholder row for ranks without rows."""
        pieces = [self.workers.start("take", own, is_bare).refs[0] for own in _indices(rows, shares)]
        return pieces, self.workers.start("spare", is_bare).refs[0]


def _indices(rows: Sequence[RowMetadata], shares: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[rows[i].index for i in share] for share in shares]


def make_rollout_buffer(plan: Plan, _: object) -> RolloutBuffer:
    """Create the rollout buffer in its worker."""
    return RolloutBuffer(plan.recipe, plan.aggregation_constant)
