"""Worker groups of several workers in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from braid.cluster.workers import Done, Factory, InProcessGroup, Pending, T, W, WorkerGroup


class Several(WorkerGroup[W]):
    def __init__(self, role: str, factories: Sequence[Factory[W]]) -> None:
        self.role, self.size = role, len(factories)
        self._groups = [InProcessGroup(role, factory) for factory in factories]

    def _start(
        self,
        ranks: Sequence[int],
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        *,
        is_beside: bool = False,
    ) -> Pending[Any]:
        calls = zip(ranks, arguments, strict=True)
        return Done(
            [self._groups[rank]._start([0], method, [args], kwargs).wait()[0] for rank, args in calls]
        )

    def wait_any(self, pending: Sequence[Pending[T]], within_s: float | None = None) -> Sequence[Pending[T]]:
        return pending

    def add(self, name: str, factory: Factory[T]) -> WorkerGroup[T]:
        raise NotImplementedError

    def close(self) -> None:
        for group in self._groups:
            group.close()
