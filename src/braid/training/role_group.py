"""A worker group for one of several roles that share processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from braid.cluster.workers import Pending, WorkerGroup


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """See WorkerGroup. One role of a group whose processes run worker.Ranks; the group owns the processes."""

    group: WorkerGroup
    name: str

    @property
    def size(self) -> int:
        return self.group.size

    def call(self, method: str, *args: Any) -> list[Any]:
        """See WorkerGroup."""
        return self.group.call(f"{self.name}.{method}", *args)

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See WorkerGroup."""
        return self.group.scatter(f"{self.name}.{method}", arguments)

    def start(self, method: str, *args: Any) -> Pending:
        """See WorkerGroup."""
        return self.group.start(f"{self.name}.{method}", *args)

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """See WorkerGroup."""
        return self.group.start_each(f"{self.name}.{method}", arguments)

    def start_on(self, rank: int, method: str, *args: Any, is_beside: bool = False) -> Pending:
        """See WorkerGroup."""
        return self.group.start_on(rank, f"{self.name}.{method}", *args, is_beside=is_beside)

    def wait_any(self, pending: Sequence[Pending], within_s: float | None = None) -> Sequence[Pending]:
        """See WorkerGroup."""
        return self.group.wait_any(pending, within_s)

    def close(self) -> None:
        """Free the role's model. The processes keep running."""
        self.group.call("drop", self.name)
