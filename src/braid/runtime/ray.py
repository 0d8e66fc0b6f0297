"""Worker groups on Ray: the one file that knows it.

Ray starts the processes and carries arguments and results; what the workers tell each other goes through torch.distributed.
A cluster that is not there is started on this machine and ended with the run.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import ray  # noqa: TID251
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError  # noqa: TID251

from braid.config.cluster import ClusterConfig
from braid.errors import WorkerError

from .workers import Factory, Place, free_address

logger = logging.getLogger(__name__)

_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_GRACE_S = 1.0
"""When a rank dies, the others may be first to tell: of a lost connection. So long is waited for who died."""
_NUM_LAST_LINES = 3


def connect(config: ClusterConfig, *, num_processes: int) -> bool:
    """Join the cluster of `cluster.address`, or start one here for so many worker processes. Does nothing when connected.
    Returns whether this call connected."""
    if ray.is_initialized():
        return False
    # Ray would otherwise copy the working directory to workers, and report usage over the network.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if config.address is not None:
        ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
        return True
    ray.init(
        num_cpus=max(num_processes, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=512 * 2**20,
    )
    return True


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends, with all its processes."""
    if ray.is_initialized():
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class _Process:
    """Where a worker runs. `stderr` is the file that its standard error goes to, on its own machine; empty where that is none."""

    pid: int
    node: str
    stderr: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.node}"


class _Host:
    """The process of one worker."""

    def __init__(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        faulthandler.enable()  # a crash in native code leaves its signal and stack among the last words
        self._worker: Any = None

    def rendezvous(self) -> str:
        """An address of this machine that is free now."""
        return free_address(ray.util.get_node_ip_address())

    def process(self) -> _Process:
        stderr = Path("/proc/self/fd/2")
        file = str(stderr.resolve()) if stderr.exists() else ""
        return _Process(os.getpid(), ray.util.get_node_ip_address(), file)

    def read(self, modules: Sequence[str]) -> None:
        for module in modules:
            importlib.import_module(module)

    def make(self, factory: Factory, place: Place) -> None:
        self._worker = factory(place)

    def run(self, method: str, *args: Any) -> Any:
        value = getattr(self._worker, method)(*[_value(arg) for arg in args])
        return asyncio.run(value) if inspect.iscoroutine(value) else value


def _value(arg: Any) -> Any:
    """What a reference stands for, alone or as an item of a list or tuple."""
    if isinstance(arg, ray.ObjectRef):
        return ray.get(arg)
    if isinstance(arg, list | tuple) and any(isinstance(item, ray.ObjectRef) for item in arg):
        return type(arg)(_value(item) for item in arg)
    return arg


@dataclass(frozen=True, slots=True)
class _Pending:
    """See runtime.workers.Pending."""

    group: RayGroup
    refs: list[Any]
    ranks: Sequence[int]
    doing: str
    deadline: float

    def wait(self) -> list[Any]:
        """See Pending."""
        return self.group._wait(self.refs, self.ranks, self.doing, self.deadline)


class RayGroup:
    """See runtime.workers.WorkerGroup."""

    def __init__(self, role: str, size: int, config: ClusterConfig, *, reads: Sequence[str] = ()) -> None:
        """Has `size` processes started, and `reads` imported in each, without waiting for any of it. `make` follows."""
        self.role, self.size = role, size
        self._config, self._timeout_s = config, config.call_timeout_s
        self._is_closed = False
        env = {**_THREADS, **config.env}
        # Its name is the title of the idle process.
        host: Any = ray.remote(num_cpus=0, max_restarts=0)(type(role, (_Host,), {}))
        self._processes: list[_Process] = []
        self._hosts: list[Any] = []
        try:
            self._hosts += [host.remote(env) for _ in range(size)]
            for h in self._hosts:
                h.read.remote(reads)  # a module that cannot be read is told when it is missed
        except BaseException:
            self.close()
            raise

    def make(self, factory: Factory) -> Self:
        """Make a worker in each process. Raises WorkerError when they are not up in time, or one of them fails."""
        deadline = time.monotonic() + self._config.start_timeout_s
        try:
            self._make(factory, deadline)
        except BaseException:
            self.close()
            raise
        return self

    def _make(self, factory: Factory, deadline: float) -> None:
        ranks = range(self.size)
        processes = [h.process.remote() for h in self._hosts]
        rendezvous = self._hosts[0].rendezvous.remote()
        self._processes = self._wait(processes, ranks, "starting", deadline)
        (url,) = self._wait([rendezvous], [0], "starting", deadline)
        makes = [h.make.remote(factory, Place(rank, self.size, url)) for rank, h in enumerate(self._hosts)]
        self._wait(makes, ranks, "being built", deadline)

    def call(self, method: str, *args: Any) -> list[Any]:
        """See WorkerGroup."""
        return self.start(method, *args).wait()

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See WorkerGroup."""
        return self.start_each(method, arguments).wait()

    def start(self, method: str, *args: Any) -> _Pending:
        """See WorkerGroup."""
        return self._pending(range(self.size), method, [args] * self.size)

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> _Pending:
        """See WorkerGroup."""
        return self._pending(range(self.size), method, arguments)

    def start_on(self, rank: int, method: str, *args: Any) -> _Pending:
        """See WorkerGroup."""
        return self._pending([rank], method, [args])

    def close(self) -> None:
        """See WorkerGroup."""
        if not self._is_closed:
            self._is_closed = True
            for host in self._hosts:
                ray.kill(host, no_restart=True)

    def _pending(self, ranks: Sequence[int], method: str, arguments: Sequence[tuple[Any, ...]]) -> _Pending:
        calls = []
        for rank, args in zip(ranks, arguments, strict=True):
            title = f"{self.role} {rank}: {method}"  # of the process while it runs
            calls.append(self._hosts[rank].run.options(name=title).remote(method, *args))
        return _Pending(self, calls, ranks, f"in {method}()", time.monotonic() + self._timeout_s)

    def _wait(self, calls: Sequence[Any], ranks: Sequence[int], doing: str, deadline: float) -> list[Any]:
        """Results by rank. The first failure ends the group: its other ranks wait for the one that failed."""
        pending, rank_of = list(calls), dict(zip(calls, ranks, strict=True))
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, min(5.0, deadline - time.monotonic())))
            errors = {rank_of[call]: error for call in done if (error := _error_of(call)) is not None}
            if errors:
                if pending and not any(isinstance(error, RayActorError) for error in errors.values()):
                    more, _ = ray.wait(pending, num_returns=len(pending), timeout=_GRACE_S)
                    errors |= {
                        rank_of[call]: error for call in more if (error := _error_of(call)) is not None
                    }
                self._fail(errors, doing)
            if not done and time.monotonic() >= deadline:
                self.close()
                late = [rank_of[call] for call in pending]
                raise WorkerError(
                    f"{self.role} workers {', '.join(map(str, late))} of {self.size} did not answer in time while {doing} "
                    f"({'; '.join(self._where(rank) for rank in late)}); raise cluster.call_timeout_s if they only need longer"
                )
        return ray.get(list(calls))

    def _fail(self, errors: Mapping[int, RayError], doing: str) -> NoReturn:
        """End the group with what its ranks came to: a death before what it made others raise."""
        self.close()
        rank, error = min(errors.items(), key=lambda item: not isinstance(item[1], RayActorError))
        who = f"{self.role} worker {rank} of {self.size}"
        if not isinstance(error, RayActorError):
            raise WorkerError(
                f"{who} failed while {doing}: {_last_line(error)} ({self._where(rank)})", _raised(error)
            ) from error
        words = self._last_words(rank)
        raise WorkerError(
            f"{who} died while {doing}: {_last_line(error)} ({self._where(rank)})"
            + (f"; its last words were: {words}" if words else "")
        ) from None

    def _where(self, rank: int) -> str:
        return str(self._processes[rank]) if self._processes else "not up yet"

    def _last_words(self, rank: int) -> str:
        """The end of a worker's standard error, where this machine has it."""
        if not self._processes or not self._processes[rank].stderr:
            return ""
        try:
            text = Path(self._processes[rank].stderr).read_text("utf-8", errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(":")]
        return " | ".join(lines[-_NUM_LAST_LINES:])


def _error_of(call: Any) -> RayError | None:
    """What became of a finished call, when it failed."""
    try:
        ray.get(call, timeout=0)
    except GetTimeoutError:
        return None
    except RayError as error:
        return error
    return None


def _raised(error: RayError) -> BaseException | None:
    """What a worker's own code raised; None where that was told of another one's end."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return None if isinstance(cause, RayError) else cause


def _last_line(error: Exception) -> str:
    """What a worker raised, or how its process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    return last.split(" Some common causes include")[0].split(" There are some potential root causes")[0]
