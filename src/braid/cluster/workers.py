"""Worker groups: the interface, and the in-process group.

A worker is a plain object; a group holds one per rank. A call names a method by the attribute of the class:

    rows = rollout.start(Collector.rows, kept)                # on rollout workers
    policy.call(TrainingBackend.infer, rows.refs[0], outputs) # from there to the ranks of the policy

`call` waits for the values; `start` returns a `Pending`, whose references can be arguments of further calls,
of this group or another. The called worker receives the value; it never passes through the caller's process.
Every call has a deadline. If a worker dies, hangs or raises, the call fails with one WorkerError that names
it. `InProcessGroup` calls its single worker directly, so that a debugger can step into it; cluster.ray has
the group of processes.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from .loops import in_thread

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Place:
    """Placement of a worker: `rank` of `size` in its group, its machine `node`, and its accelerators
    `devices`, numbered across all machines; the worker sees only these, as 0, 1, ...

    `rendezvous` is the address (host, port) where the ranks meet: that of the socket `listener` of rank 0,
    which is open from before the ranks learn the address until rank 0's process exits. None for a single
    worker. `address` is that at which other machines of the cluster reach this one; None in a run without
    workers. `workers` are those that the process holds already, by name."""

    rank: int
    size: int
    rendezvous: tuple[str, int] | None = None
    listener: socket.socket | None = None
    node: int = 0
    devices: tuple[int, ...] = ()
    workers: Mapping[str, Any] = field(default_factory=dict)
    address: str | None = None


class Placement(Protocol):
    """Placement of a worker in a layout (plan.layout): its machine, and its devices, numbered across all
    machines."""

    @property
    def node(self) -> int: ...
    @property
    def devices(self) -> tuple[int, ...]: ...


Factory = Callable[[Place], W]
"""Creates a worker, in the worker's process."""

Ref = Any
"""Opaque reference to a value that is, or will be, in another process. Can be passed as an argument, or as an
item of a list or tuple argument."""


class Joined(tuple[Ref, ...]):
    """References to lists, as an argument that the called worker receives as one list."""


class Pending(Protocol[R]):
    """A running call, on all ranks of a group or on one."""

    @property
    def refs(self) -> list[Ref]:
        """References to the values, by rank."""
        ...

    def wait(self) -> list[R]:
        """Wait for the values, by rank. Raises WorkerError if a worker fails or the deadline passes."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `method` on workers of `ranks`, with separate arguments for each."""

    ranks: Sequence[int]
    method: str
    arguments: Sequence[tuple[Any, ...]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_beside: bool = False


class _Proxy:
    def __init__(self, cls: type, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._class, self._call = cls, call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not callable(getattr(self._class, name, None)):
            near = get_close_matches(name, dir(self._class), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"{self._class.__qualname__} has no method {name!r}{hint}")
        return lambda *args, **kwargs: self._call(name, args, kwargs)


def proxy(cls: type[W], call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> W:
    """An object with the methods of a worker's class, each of which calls `call` with its name and arguments.
    Any other name is an AttributeError."""
    made: Any = _Proxy(cls, call)
    return made


class WorkerGroup(ABC, Generic[W]):
    """One worker per rank, all of one class. Calls to a process run one at a time, in the order in which they
    were made, except those of `start_beside`. References may take the place of arguments."""

    role: str
    size: int

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the method on all workers in parallel; returns the values by rank. Raises WorkerError."""
        return self.start(method, *args, **kwargs).wait()

    def scatter(
        self, method: Callable[Concatenate[W, ...], R], arguments: Sequence[tuple[Any, ...]]
    ) -> list[R]:
        """`call` with separate arguments for each rank."""
        return self._start(Call(range(self.size), method.__name__, arguments)).wait()

    def start(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """`call` without waiting."""
        return self._start(Call(range(self.size), method.__name__, [args] * self.size, kwargs))

    def start_each(
        self, method: Callable[Concatenate[W, ...], R], arguments: Sequence[tuple[Any, ...]]
    ) -> Pending[R]:
        """`scatter` without waiting."""
        return self._start(Call(range(self.size), method.__name__, arguments))

    def start_on(
        self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """`start` on one worker; the result has its value only."""
        return self._start(Call([rank], method.__name__, [args], kwargs))

    def start_beside(
        self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """`start_on` in another thread of the worker's process, beside other calls."""
        return self._start(Call([rank], method.__name__, [args], kwargs, is_beside=True))

    def first(self, cls: type[W]) -> W:
        """The first worker: the methods of its class `cls`, called in its process."""
        return proxy(cls, lambda name, args, kwargs: self._start(Call([0], name, [args], kwargs)).wait()[0])

    def every(self, cls: type[W]) -> W:
        """All workers, called in parallel. For methods of their class `cls` whose result is the same on all,
        or None: the first worker's is returned."""
        ranks = range(self.size)
        return proxy(
            cls,
            lambda name, args, kwargs: self._start(Call(ranks, name, [args] * len(ranks), kwargs)).wait()[0],
        )

    @abstractmethod
    def _start(self, call: Call) -> Pending[Any]: ...

    @abstractmethod
    def wait_any(self, pending: Sequence[Pending[T]], within_s: float | None = None) -> Sequence[Pending[T]]:
        """Wait until one of these calls has finished or failed, for `within_s` seconds at most; returns those
        that have. Raises WorkerError."""

    @abstractmethod
    def is_done(self, call: Pending[Any], within_s: float) -> bool:
        """Whether all ranks have finished a call, after waiting for `within_s` seconds at most. Raises
        WorkerError."""

    @abstractmethod
    def add(self, name: str, factory: Factory[T]) -> WorkerGroup[T]:
        """Create another worker in each process. Closing its group frees it and leaves the processes
        running."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers (one in this process by its `close`, if it has one) and their processes.
        Idempotent."""


_GLANCE_S = 0.02


def wait_for_all(calls: Sequence[tuple[WorkerGroup[Any], Pending[Any]]]) -> None:
    """Wait for calls of several groups that exchange data with each other. The first failure ends the wait
    for all: those that wait for the failed one would otherwise do so until their deadlines. Raises
    WorkerError."""
    pending = list(calls)
    while len(pending) > 1:
        pending = [(group, call) for group, call in pending if not group.is_done(call, _GLANCE_S)]
    for _, call in calls:
        call.wait()


@dataclass(frozen=True, slots=True)
class Started(Generic[R]):
    """A call in a thread of this process."""

    future: Future[list[R]]

    @property
    def refs(self) -> list[R]:
        """Wait for the values, which are the references themselves."""
        return self.wait()

    def wait(self) -> list[R]:
        """Wait for the thread; its exception is raised unchanged."""
        return self.future.result()


@dataclass(frozen=True, slots=True)
class Done(Generic[R]):
    """A completed call; the references are the values themselves."""

    refs: list[R]

    def wait(self) -> list[R]:
        """The value, without waiting."""
        return self.refs


class InProcessGroup(WorkerGroup[W]):
    """A single worker in this process, called directly: exceptions propagate unchanged, nothing is copied,
    and a call is complete when `start` returns. With `has_threads`, calls beside others run in threads."""

    size = 1

    def __init__(
        self,
        role: str,
        factory: Factory[W],
        *,
        workers: dict[str, Any] | None = None,
        has_threads: bool = False,
    ) -> None:
        """`workers` are those of other groups in this process, which the new one joins."""
        self.role, self._has_threads = role, has_threads
        self._workers: dict[str, Any] = {} if workers is None else workers
        self._worker: Any = factory(Place(0, 1, workers=self._workers))
        self._workers[role] = self._worker

    def _start(self, call: Call) -> Pending[Any]:
        assert list(call.ranks) == [0], f"there is only one {self.role} worker, not {call.ranks}"
        (args,) = call.arguments
        args = [list(chain(*arg)) if isinstance(arg, Joined) else arg for arg in args]
        called = partial(getattr(self._worker, call.method), *args, **call.kwargs)
        if call.is_beside and self._has_threads:
            return Started(in_thread(lambda: [called()]))
        return Done([called()])

    def wait_any(self, pending: Sequence[Pending[T]], within_s: float | None = None) -> Sequence[Pending[T]]:
        """The calls that have finished: all, unless workers have threads."""
        if not self._has_threads:
            return pending
        futures = {call.future: call for call in pending if isinstance(call, Started)}
        return [futures[future] for future in wait(futures, within_s, FIRST_COMPLETED).done]

    def is_done(self, call: Pending[Any], within_s: float) -> bool:
        """Whether the call has finished; only one in a thread is waited for."""
        return not isinstance(call, Started) or bool(wait([call.future], within_s).done)

    def add(self, name: str, factory: Factory[T], *, has_threads: bool = False) -> InProcessGroup[T]:
        """Create another worker in this process."""
        return InProcessGroup(name, factory, workers=self._workers, has_threads=has_threads)

    def close(self) -> None:
        """Close the worker, if it has a `close`, and forget it."""
        worker = self._workers.pop(self.role, None)
        if hasattr(worker, "close"):
            worker.close()
