"""Worker groups on Ray: the one file that knows it.

Ray starts the processes and carries arguments and results; what the workers tell each other goes through torch.distributed.
A cluster that is not there is started on this machine and ended with the run.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray  # noqa: TID251
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError  # noqa: TID251

from braid.config.cluster import ClusterConfig
from braid.errors import WorkerError

from .workers import Factory, Place

logger = logging.getLogger(__name__)

_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


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


class _Host:
    """The process of one worker."""

    def __init__(self, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._worker: Any = None

    def rendezvous(self) -> str:
        """An address in this process's machine that is free now."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1" if ray.util.get_node_ip_address() == "127.0.0.1" else "", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{sock.getsockname()[1]}"

    def pid(self) -> int:
        return os.getpid()

    def make(self, factory: Factory, place: Place) -> None:
        self._worker = factory(place)

    def run(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*[_value(arg) for arg in args])


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
    doing: str
    deadline: float

    def wait(self) -> list[Any]:
        """See Pending."""
        return self.group._wait(self.refs, self.doing, self.deadline)


class RayGroup:
    """See runtime.workers.WorkerGroup."""

    def __init__(
        self,
        role: str,
        factory: Factory,
        size: int,
        config: ClusterConfig,
        *,
        ends_cluster: bool = False,
    ) -> None:
        """Starts `size` processes and makes a worker in each. Raises WorkerError when they are not up in time. With
        `ends_cluster`, closing the group disconnects too."""
        self.role, self.size = role, size
        self._ends_cluster = ends_cluster
        self._timeout_s = config.call_timeout_s
        self._is_closed = False
        env = {**_THREADS, **config.env}
        host: Any = ray.remote(num_cpus=0, max_restarts=0)(_Host)
        self._hosts: list[Any] = [host.options(name=None).remote(env) for _ in range(size)]
        deadline = time.monotonic() + config.start_timeout_s
        self._pids = self._wait([h.pid.remote() for h in self._hosts], "starting", deadline)
        (rendezvous,) = self._wait([self._hosts[0].rendezvous.remote()], "starting", deadline)
        makes = [h.make.remote(factory, Place(rank, size, rendezvous)) for rank, h in enumerate(self._hosts)]
        self._wait(makes, "being built", deadline)

    def call(self, method: str, *args: Any) -> list[Any]:
        """See WorkerGroup."""
        return self.start(method, *args).wait()

    def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See WorkerGroup."""
        return self.start_each(method, arguments).wait()

    def start(self, method: str, *args: Any) -> _Pending:
        """See WorkerGroup."""
        return self._pending(self._hosts, method, [args] * self.size)

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> _Pending:
        """See WorkerGroup."""
        return self._pending(self._hosts, method, arguments)

    def start_on(self, rank: int, method: str, *args: Any) -> _Pending:
        """See WorkerGroup."""
        return self._pending(self._hosts[rank : rank + 1], method, [args])

    def close(self) -> None:
        """See WorkerGroup."""
        if not self._is_closed:
            self._is_closed = True
            for host in self._hosts:
                ray.kill(host, no_restart=True)
            if self._ends_cluster:
                disconnect()

    def _pending(self, hosts: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]) -> _Pending:
        calls = [host.run.remote(method, *args) for host, args in zip(hosts, arguments, strict=True)]
        return _Pending(self, calls, f"in {method}()", time.monotonic() + self._timeout_s)

    def _wait(self, calls: Sequence[Any], doing: str, deadline: float) -> list[Any]:
        """Results by rank. The first failure ends the group: its other ranks wait for the one that failed."""
        pending = list(calls)
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, min(5.0, deadline - time.monotonic())))
            for call in done:
                self._check(call, calls.index(call), doing)
            if not done and time.monotonic() >= deadline:
                ranks = ", ".join(str(calls.index(call)) for call in pending)
                self.close()
                raise WorkerError(
                    f"{self.role} workers {ranks} of {self.size} did not answer in time while {doing}; "
                    "raise cluster.call_timeout_s if they only need longer"
                )
        return ray.get(list(calls))

    def _check(self, call: Any, rank: int, doing: str) -> None:
        who = f"{self.role} worker {rank} of {self.size}"
        try:
            ray.get(call, timeout=0)
        except GetTimeoutError:
            return
        except RayActorError as error:
            self.close()
            raise WorkerError(f"{who} died while {doing}: {_last_words(error)}") from None
        except RayTaskError as error:
            self.close()
            raise WorkerError(f"{who} failed while {doing}: {_last_words(error)}") from error


def _last_words(error: Exception) -> str:
    """What a worker raised, or how its process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    return last.split(" Some common causes include")[0]
