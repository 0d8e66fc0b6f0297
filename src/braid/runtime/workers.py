"""Groups of worker processes, whatever starts them.

A worker is a plain object; a group holds one per rank, each in a process of its own, and calls their methods. Every call has a
deadline, and a worker that dies, hangs or raises ends the call with one WorkerError that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in its group: `rank` of `size`, and how the ranks of the group find each other (a URL for
    torch.distributed's init_method)."""

    rank: int
    size: int
    rendezvous: str


Factory = Callable[[Place], Any]
"""Makes a worker, in its own process."""


class WorkerGroup(Protocol):
    """Workers of one role."""

    @property
    def size(self) -> int: ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """`method(*args)` on every worker at once; results by rank. Raises WorkerError."""
        ...

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same with arguments of its own for each rank."""
        ...

    def close(self) -> None:
        """End the processes. Can be called twice."""
        ...
