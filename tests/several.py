"""Worker groups of several workers in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from braid.cluster.workers import Call, Done, Factory, InProcessGroup, Pending, T, W, WorkerGroup


class Several(WorkerGroup[W]):
    def __init__(self, role: str, factories: Sequence[Factory[W]]) -> None:
        self.role, self.size = role, len(factories)
        self._groups = [InProcessGroup(role, factory) for factory in factories]

    def _start(self, call: Call) -> Pending[Any]:
        calls = [
            (self._groups[rank], replace(call, ranks=[0], arguments=[args]))
            for rank, args in zip(call.ranks, call.arguments, strict=True)
        ]
        return Done([group._start(one).wait()[0] for group, one in calls])

    def wait_any(self, pending: Sequence[Pending[T]], within_s: float | None = None) -> Sequence[Pending[T]]:
        return pending

    def is_done(self, call: Pending[Any], within_s: float) -> bool:
        raise NotImplementedError

    def add(self, name: str, factory: Factory[T]) -> WorkerGroup[T]:
        raise NotImplementedError

    def close(self) -> None:
        for group in self._groups:
            group.close()
