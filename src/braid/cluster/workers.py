"""Worker groups: the interface, and the in-process group.

A worker is a plain object; a group holds one per rank and calls their methods. `call` waits for the values;
`start` returns a `Pending`, whose references can be arguments of further calls, of this group or another. The
called worker receives the value; it never passes through the caller's process.

    rows = rollout.start("make_rows", prompts)        # on rollout workers
    policy.start("train", rows.refs, loss).wait()     # from there to the ranks of the policy

Every call has a deadline. If a worker dies, hangs or raises, the call fails with one WorkerError that names
it. `InProcessGroup` calls its single worker directly, so that a debugger can step into it; cluster.ray has
the group of processes.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from .loops import Loop, in_thread


@dataclass(frozen=True, slots=True)
class Place:
    """Placement of a worker: `rank` of `size` in its group, its machine `node`, and its accelerators
    `devices`, numbered across all machines; the worker sees only these, as 0, 1, ...

    `rendezvous` is the address (host, port) where the ranks meet: that of the socket `listener` of rank 0,
    which is open from before the ranks learn the address until rank 0's process exits. None for a single
    worker."""

    rank: int
    size: int
    rendezvous: tuple[str, int] | None = None
    listener: socket.socket | None = None
    node: int = 0
    devices: tuple[int, ...] = ()


class Placement(Protocol):
    """Placement of a worker in a layout (plan.layout): its machine, and its devices, numbered across all
    machines."""

    @property
    def node(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]: ...


Factory = Callable[[Place], Any]
"""Creates a worker, in the worker's process."""

Ref = Any
"""Opaque reference to a value that is, or will be, in another process. Can be passed as an argument, or as an
item of a list or tuple argument."""


class Pending(Protocol):
    """A running call, on all ranks of a group or on one."""

    @property
    def refs(self) -> list[Ref]:
        """References to the values, by rank."""
        ...

    def wait(self) -> list[Any]:
        """Wait for the values, by rank. Raises WorkerError if a worker fails or the deadline passes."""
        ...


class WorkerGroup(Protocol):
    """Workers of one role. Calls to a rank run one at a time, in the order in which they were made, except those
    that run beside the others; `async def` methods run to completion."""

    @property
    def size(self) -> int: ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call `method(*args)` on all workers in parallel; returns the values by rank. Raises WorkerError."""
        ...

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`call` with separate arguments for each rank."""
        ...

    def start(self, method: str, *args: Any) -> Pending:
        """`call` without waiting."""
        ...

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> Pending:
        """`scatter` without waiting."""
        ...

    def start_on(self, rank: int, method: str, *args: Any, is_beside: bool = False) -> Pending:
        """Start `method(*args)` on one worker; the result has its value only. With `is_beside` it runs in another
        thread, beside other calls."""
        ...

    def wait_any(self, pending: Sequence[Pending], within_s: float | None = None) -> Sequence[Pending]:
        """Wait until one of these calls has finished or failed, for `within_s` seconds at most; returns those that
        have. Raises WorkerError."""
        ...

    def close(self) -> None:
        """Stop the workers (one in this process by its `close`, if it has one) and their processes.
        Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Started:
    """See Pending. A call in a thread of this process."""

    future: Future[list[Any]]

    @property
    def refs(self) -> list[Any]:
        """See Pending. Waits for the values, which are the references themselves."""
        return self.wait()

    def wait(self) -> list[Any]:
        """See Pending."""
        return self.future.result()


@dataclass(frozen=True, slots=True)
class Done:
    """See Pending. A completed call; the references are the values themselves."""

    refs: list[Any]

    def wait(self) -> list[Any]:
        """See Pending."""
        return self.refs


class InProcessGroup:
    """See WorkerGroup. A single worker in this process, called directly: exceptions propagate unchanged,
    nothing is copied, and a call is complete when `start` returns."""

    size = 1

    def __init__(self, role: str, factory: Factory, *, has_threads: bool = False) -> None:
        self.role, self._has_threads = role, has_threads
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

    def start_on(self, rank: int, method: str, *args: Any, is_beside: bool = False) -> Pending:
        """See WorkerGroup. With `has_threads`, calls beside others run in threads."""
        assert rank == 0, f"there is only one {self.role} worker, not rank {rank}"
        if is_beside and self._has_threads:
            return Started(in_thread(partial(self.call, method, *args)))
        return Done(self.call(method, *args))

    def wait_any(self, pending: Sequence[Pending], within_s: float | None = None) -> Sequence[Pending]:
        """See WorkerGroup."""
        if not self._has_threads:
            return pending
        futures = {of.future: of for of in pending if isinstance(of, Started)}
        return [futures[of] for of in wait(futures, within_s, FIRST_COMPLETED).done]

    def close(self) -> None:
        """See WorkerGroup."""
        if self._is_closed:
            return
        self._is_closed = True
        if hasattr(self._worker, "close"):
            self.call("close")
        if self._loop is not None:
            self._loop.close()
