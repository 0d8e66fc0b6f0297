"""Groups of workers, whatever starts them.

A worker is a plain object; a group holds one per rank and calls their methods. `call` waits for the values; `start` gives a
`Pending`, whose references can be arguments of further calls, of this group or another: the worker that is called sees
the value, and the process that makes the call never does.

    rows = rollout.start("make_rows", prompts)        # on rollout workers
    policy.start("train", rows.refs, loss).wait()     # from there to the ranks of the policy

Every call has a deadline. A worker that dies, hangs or raises ends the call with one WorkerError that names it. `InProcessGroup`
calls its one worker directly, so that a debugger steps into it; runtime.ray has the group of processes.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .loops import Loop


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in its group: `rank` of `size`, on which machine of the run, and with which accelerators, by their
    numbers through the machines; it sees these, and no others, as 0, 1, ...

    `rendezvous` is where the ranks find each other: the address (host, port) of a socket that rank 0 has, its `listener`,
    from before any of them is told until the end of its process. There is none for one worker alone."""

    rank: int
    size: int
    rendezvous: tuple[str, int] | None = None
    listener: socket.socket | None = None
    node: int = 0
    devices: tuple[int, ...] = ()


class Seat(Protocol):
    """What a layout says of one worker (plan.layout): its machine, and its devices by their numbers through the machines."""

    @property
    def node(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]: ...


Factory = Callable[[Place], Any]
"""Makes a worker, in its own process."""

Ref = Any
"""A value that is, or will be, in another process. Opaque: it is passed on, alone or as an item of a list or tuple that is an
argument."""


class Pending(Protocol):
    """A call under way, on every rank of a group or on one."""

    @property
    def refs(self) -> list[Ref]:
        """References to the values, by rank."""
        ...

    def wait(self) -> list[Any]:
        """The values by rank. Raises WorkerError when a worker fails or the call's deadline passes."""
        ...


class WorkerGroup(Protocol):
    """Workers of one role. Calls of one rank run in the order in which they were made; methods that are `async def`, in a
    group made for them, at the same time."""

    @property
    def size(self) -> int: ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """`method(*args)` on every worker at once; values by rank. Raises WorkerError."""
        ...

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same with arguments of its own for each rank."""
        ...

    def start(self, method: str, *args: Any) -> Pending:
        """`call` without waiting."""
        ...

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """`scatter` without waiting."""
        ...

    def start_on(self, rank: int, method: str, *args: Any) -> Pending:
        """`method(*args)` on one worker; its value is the only one."""
        ...

    def close(self) -> None:
        """End the workers: their own `close`, where they have one, then their processes. Can be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """See Pending. A call that has been made; its values are their own references."""

    refs: list[Any]

    def wait(self) -> list[Any]:
        """See Pending."""
        return self.refs


class InProcessGroup:
    """See WorkerGroup. One worker in this process, called directly: what it raises goes through as it is, nothing is
    copied, and a call is over when `start` returns."""

    size = 1

    def __init__(self, role: str, factory: Factory) -> None:
        self.role = role
        self._worker = factory(Place(0, 1))
        self._loop: Loop | None = None
        self._is_closed = False

    def call(self, method: str, *args: Any) -> list[Any]:
        """See WorkerGroup."""
        value = getattr(self._worker, method)(*args)
        if inspect.iscoroutine(value):
            self._loop = self._loop or Loop()
            value = self._loop.run(value)
        return [value]

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See WorkerGroup."""
        (args,) = arguments
        return self.call(method, *args)

    def start(self, method: str, *args: Any) -> Done:
        """See WorkerGroup."""
        return Done(self.call(method, *args))

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Done:
        """See WorkerGroup."""
        return Done(self.scatter(method, arguments))

    def start_on(self, rank: int, method: str, *args: Any) -> Done:
        """See WorkerGroup."""
        assert rank == 0, f"there is one {self.role} worker, and no rank {rank}"
        return Done(self.call(method, *args))

    def close(self) -> None:
        """See WorkerGroup."""
        if self._is_closed:
            return
        self._is_closed = True
        if hasattr(self._worker, "close"):
            self.call("close")
        if self._loop is not None:
            self._loop.close()
