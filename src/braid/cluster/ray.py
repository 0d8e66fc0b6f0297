"""Worker groups on Ray.

Ray starts the processes and carries arguments and results; workers communicate with each other through
torch.distributed. If there is no cluster, one is started on this machine and stopped with the run.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, cast

# Suppresses Ray's message about a worker's death, since WorkerError says more. Ray reads this at import.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "died or was killed")

import ray  # noqa: TID251
from ray.exceptions import (  # noqa: TID251
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from braid.config.cluster import ClusterConfig
from braid.cores import num_cores
from braid.errors import BraidError, ConfigError, EngineError, Problem, WorkerError
from braid.processes import is_running, kill, stacks_on_signal

from . import watchdog
from .environment import THREADS
from .machines import Machines, connect, family_of, interface_of, num_cluster_gpus
from .machines import leave as disconnect
from .oom import KillCount
from .reports import Report, log_to, reports
from .status import open_calls
from .workers import Call, Factory, Joined, Pending, Place, Placement, R, T, W, WorkerGroup

__all__ = ["Machines", "RayGroup", "connect", "disconnect", "num_cluster_gpus"]

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_BESIDE, _REPORTS = "beside", "reports"
_CONCURRENCY = {_BESIDE: 2, _REPORTS: 1}
"""Concurrency groups of calls that run beside the others, and their numbers of threads."""
_MAIN = "main"
"""Name, in its process, of the worker that a group was made for."""
_TICK_S = 0.2
"""Interval, in seconds, at which waiting calls check for lost workers of any group."""
_GRACE_S = 1.0
"""When a rank dies, other ranks may report a lost connection first. This is the time, in seconds, to wait for
the actual loss."""
_LISTEN_S = 0.5
"""Interval, in seconds, at which kills for lack of memory are counted: how close to a worker's death one must
be to count as its cause."""
_NUM_LAST_LINES = 3
_ENDED = "its process was killed or crashed"
_LESS_MEMORY = (
    "lower train.micro_batch_tokens (critic.train's for the critic), set train.offload, set lower values of "
    "rollout.engine.kv_budget_tokens or rollout.engine.memory_fraction, or use a machine with more memory"
)


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost worker: `rank` of its group. `said` is the reason that it reported; None if its process died, as
    Ray's `error` says; `is_oom` if it was killed for lack of memory (False: unknown)."""

    group: RayGroup[Any]
    rank: int
    said: str | None = None
    error: RayError | None = None
    is_oom: bool = False


class _Losses:
    """The lost workers of all groups that are open: each concerns the whole run."""

    def __init__(self) -> None:
        self._all: list[Loss] = []
        self._changed = threading.Condition()

    def add(self, loss: Loss) -> None:
        with self._changed:
            self._all = [*self._open(), loss]
            self._changed.notify_all()

    def first(self, timeout_s: float = 0.0) -> Loss | None:
        """The first one; waits up to `timeout_s` for it."""
        with self._changed:
            self._changed.wait_for(self._open, timeout_s)
            return next(iter(self._open()), None)

    def _open(self) -> list[Loss]:
        return [loss for loss in self._all if not loss.group.is_closed]


_losses = _Losses()


@dataclass(frozen=True, slots=True)
class _Process:
    """The process of a worker. `log` is the file on its machine with its standard error, from byte `start`;
    empty if it is not a file."""

    pid: int
    node: str
    log: str
    start: int
    raylet: int
    """Pid of Ray's process on that machine, whose child this one is."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.node}"


class _Host:
    """The Ray actor of one worker."""

    def __init__(self, env: Mapping[str, str | None], is_local: bool, num_sharing: int = 1) -> None:
        """With `is_local` all workers are on this machine, and communicate over loopback. Unless `env` sets
        the number of threads, it is this machine's cores divided by `num_sharing`."""
        for name, value in env.items():
            os.environ.pop(name, None)  # Ray sets OMP_NUM_THREADS itself
            if value is not None:
                os.environ[name] = value
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_sharing)))
        self._is_local = is_local
        if is_local and (interface := interface_of(LOOPBACK)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._workers: dict[str, Any] = {}
        self._listener: socket.socket | None = None

    def rendezvous(self) -> tuple[str, int]:
        """Open the rendezvous address of the ranks, in this process, for as long as it lives."""
        host = LOOPBACK if self._is_local else ray.util.get_node_ip_address()
        self._listener = socket.create_server((host, 0), family=family_of(host))
        return host, self._listener.getsockname()[1]

    def process(self, log: Path | None, is_own: bool) -> _Process:
        """Redirect output to `log`, if any, and start the watchdog. With `is_own` the cluster was started by
        the driver. Raises ConfigError if the log's folder does not exist on this machine."""
        node = ray.util.get_node_ip_address()
        if log is not None:
            if not log.parent.is_dir():
                message = (
                    f"the machine {node} has no {log.parent}; choose a folder on a file system shared by all "
                    "machines of the run"
                )
                raise ConfigError([Problem("run.output_dir", message)])
            # For the last collectives, when one times out.
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{log.with_suffix('')}.nccl.")
        log_to(log)
        watchdog.start(ends_raylet=is_own)
        stacks_on_signal()
        faulthandler.enable()  # a crash in native code leaves its signal and stack in the last log lines
        stderr = Path("/proc/self/fd/2")
        written = stderr.resolve() if stderr.exists() else None
        start = written.stat().st_size if written is not None and written.is_file() else 0
        return _Process(os.getpid(), node, str(written or ""), start, os.getppid())

    @ray.method(concurrency_group=_REPORTS, num_returns="streaming")
    def reports(self) -> Iterator[Report]:
        """Yield this worker's reports, until it ends."""
        yield from reports()

    def read(self, modules: Sequence[str]) -> None:
        for module in modules:
            importlib.import_module(module)

    def make(self, name: str, factory: Factory[Any], place: Place) -> None:
        address = ray.util.get_node_ip_address()
        place = replace(place, listener=self._listener, workers=self._workers, address=address)
        self._workers[name] = factory(place)

    def drop(self, name: str) -> None:
        del self._workers[name]

    def run(self, name: str, method: str, kwargs: Mapping[str, Any], *args: Any) -> Any:
        kwargs = {key: _value(arg) for key, arg in kwargs.items()}
        return getattr(self._workers[name], method)(*[_value(arg) for arg in args], **kwargs)


def _value(arg: Any) -> Any:
    """Resolve references in an argument: the argument itself, or the items of a list or tuple."""
    if isinstance(arg, ray.ObjectRef):
        return ray.get(arg)
    if isinstance(arg, Joined):
        return [item for part in arg for item in _value(part)]
    if isinstance(arg, list | tuple) and any(isinstance(item, ray.ObjectRef) for item in arg):
        return type(arg)(_value(item) for item in arg)
    return arg


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Pending:
    """A running call of Ray actors: its references, by the order of `ranks`, and its deadline."""

    group: RayGroup[Any]
    refs: list[Any]
    ranks: Sequence[int]
    doing: str
    deadline: float

    def wait(self) -> list[Any]:
        """Wait for the values, by rank. Raises WorkerError."""
        return self.group._wait(self.refs, self.ranks, self.doing, self.deadline)

    def waits_for(self) -> str | None:
        """The ranks that have not returned, since when, and where they are; None once all have."""
        rank_of = dict(zip(self.refs, self.ranks, strict=True))
        _, left = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        if not left or self.group.is_closed:
            return None
        ranks = [rank_of[call] for call in left]
        since_s = time.monotonic() - self.deadline + self.group._timeout_s
        where = "; ".join(self.group._where(rank) for rank in ranks)
        named = f"{self.group.role} {', '.join(map(str, ranks))} of {self.group.size}"
        return f"{named} {self.doing} for {since_s:.1f} s ({where})"


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker of another group. The driver notices its death; here it only ends the calls."""

    name: str
    host: Any
    timeout_s: float

    def start(self, method: Callable[..., R], *args: Any) -> Callable[[], R]:
        """Call a method of the worker's class, after earlier calls; the function that is returned waits for
        the value. It raises what the method raises, and EngineError if the worker dies or does not answer in
        time."""
        run = self.host.run.options(name=f"{self.name}: {method.__name__}")
        called = run.remote(_MAIN, method.__name__, {}, *args)
        return partial(self._value_of, called, method.__name__)

    def _value_of(self, called: Any, doing: str) -> Any:
        try:
            return ray.get(called, timeout=self.timeout_s)
        except GetTimeoutError as error:
            why = f"took longer than {self.timeout_s:g} s (cluster.call_timeout_s)"
            raise EngineError(f"{self.name}: {doing}() {why}") from error
        except RayError as error:
            raised = _raised(error)
            raise (
                raised if isinstance(raised, BraidError) else EngineError(f"{self.name}: {_told(error)}")
            ) from error


class RayGroup(WorkerGroup[W]):
    """See WorkerGroup. Owns the processes of its workers."""

    def __init__(
        self,
        role: str,
        placements: int | Sequence[Placement],
        config: ClusterConfig,
        *,
        machines: Machines | None = None,
        reads: Sequence[str] = (),
        env: Mapping[str, str | None] = THREADS,
        sharing: Sequence[int] | None = None,
    ) -> None:
        """Start a process for each of the `placements` on `machines` (an int: that many, anywhere), and
        import the modules `reads` in each, without waiting. `make` has to follow. `env` are environment
        variables that `cluster.env` does not set; None removes one. `sharing` is, by rank, the number of
        processes with which a worker shares its machine's cores, unless OMP_NUM_THREADS is set."""
        assert isinstance(placements, int) == (machines is None), (
            "pass machines if and only if placements are given"
        )
        self.role, self.size = role, placements if isinstance(placements, int) else len(placements)
        self._placements = None if isinstance(placements, int) else placements
        self._config, self._timeout_s = config, config.call_timeout_s
        self.is_closed, self.is_made, self._listens = False, False, True
        # The class name is the process title while idle.
        options = {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": _CONCURRENCY}
        host: Any = ray.remote(**options)(type(role, (_Host,), {}))
        self._processes: list[_Process] = []
        self._asked = [""] * self.size
        self._hosts: list[Any] = []
        self._places: list[Place] = []
        self._listening = threading.Thread(target=self._listen, name=f"reports of {role}", daemon=True)
        is_local = not config.is_joined or (machines is not None and machines.is_one)
        variables = config.variables
        try:
            shares = sharing or [1] * self.size
            for placement, num_sharing in zip(self._placements or [None] * self.size, shares, strict=True):
                where, worker_variables = (
                    machines.spot(placement, variables) if machines and placement else ("DEFAULT", variables)
                )
                new = host.options(scheduling_strategy=where)
                self._hosts.append(new.remote({**env, **worker_variables}, is_local, num_sharing))
            for h in self._hosts:
                h.read.remote(reads)  # an import error surfaces when the module is needed
        except BaseException:
            self.close()
            raise

    def make(self, factory: Factory[W], logs: Path | None = None) -> Self:
        """Create a worker in each process. From then on its output goes to `ROLE-RANK.log` in `logs`, without
        `logs` to Ray's log file. Raises WorkerError if a worker fails or is not
        up in time."""
        deadline = time.monotonic() + self._config.start_timeout_s
        try:
            self._make(factory, logs, deadline)
        except BaseException:
            self.close()
            raise
        return self

    def _make(self, factory: Factory[W], logs: Path | None, deadline: float) -> None:
        ranks = range(self.size)
        if logs is not None:
            logs.mkdir(exist_ok=True)
        files = [None if logs is None else logs.absolute() / f"{self.role}-{rank}.log" for rank in ranks]
        is_own = not self._config.is_joined
        processes = [h.process.remote(file, is_own) for h, file in zip(self._hosts, files, strict=True)]
        rendezvous = [self._hosts[0].rendezvous.remote()] if self.size > 1 else []
        self._processes = self._wait(processes, ranks, "starting", deadline)
        self._listening.start()
        self.is_made = True
        (address,) = self._wait(rendezvous, [0], "starting", deadline) if rendezvous else [None]
        self._places = [Place(rank, self.size, address) for rank in ranks]
        if self._placements is not None:
            self._places = [
                replace(p, node=s.node, devices=s.devices)
                for p, s in zip(self._places, self._placements, strict=True)
            ]
        self._make_workers(_MAIN, factory, deadline)

    def _make_workers(self, name: str, factory: Factory[Any], deadline: float) -> None:
        makes = [
            h.make.remote(name, factory, place) for h, place in zip(self._hosts, self._places, strict=True)
        ]
        self._wait(makes, range(self.size), "being built", deadline)

    def add(self, name: str, factory: Factory[T]) -> WorkerGroup[T]:
        """Create another worker in each of the processes."""
        self._make_workers(name, factory, time.monotonic() + self._timeout_s)
        return _Added(self, name)

    def _start(self, call: Call, name: str = "") -> _Pending:
        """`name` is that of an added worker."""
        options = {"concurrency_group": _BESIDE} if call.is_beside else {}
        shown = f"{call.method}()" if name in ("", self.role) else f"{name}.{call.method}()"
        calls = []
        for rank, args in zip(call.ranks, call.arguments, strict=True):
            title = f"{self.role} {rank}: {shown.removesuffix('()')}"  # process title during the call
            self._asked[rank] = shown
            run = self._hosts[rank].run.options(name=title, **options)
            calls.append(run.remote(name or _MAIN, call.method, call.kwargs, *args))
        pending = _Pending(self, calls, call.ranks, f"in {shown}", time.monotonic() + self._timeout_s)
        open_calls.add(pending)
        return pending

    def wait_any(self, pending: Sequence[Pending[T]], within_s: float | None = None) -> Sequence[Pending[T]]:
        """Wait until one of the calls has finished or failed. Their deadline is the earliest of all."""
        rank_of = {
            call: rank
            for started in cast("Sequence[_Pending]", pending)
            for call, rank in zip(started.refs, started.ranks, strict=True)
        }
        (doing,) = {started.doing for started in cast("Sequence[_Pending]", pending)}
        deadline = min(started.deadline for started in cast("Sequence[_Pending]", pending))
        until = None if within_s is None else time.monotonic() + within_s
        left = self._watch(rank_of, doing, deadline, is_any=True, until=until)
        return [started for started in pending if not any(call in left for call in started.refs)]

    def is_done(self, call: Pending[Any], within_s: float) -> bool:
        """Whether all ranks have finished the call, after waiting for `within_s` seconds at most."""
        pending = cast("_Pending", call)
        rank_of = dict(zip(pending.refs, pending.ranks, strict=True))
        return not self._watch(rank_of, pending.doing, pending.deadline, until=time.monotonic() + within_s)

    def peers(self) -> list[Peer]:
        """The workers by rank, as workers of other groups call them."""
        return [Peer(self._name(rank), host, self._timeout_s) for rank, host in enumerate(self._hosts)]

    def _drop(self, name: str) -> None:
        self._wait(
            [h.drop.remote(name) for h in self._hosts],
            range(self.size),
            f"in {name}.close()",
            time.monotonic() + self._timeout_s,
        )

    def close(self) -> None:
        """Kill the processes, and wait until they have ended."""
        if self.is_closed:
            return
        self.is_closed = True
        for host in self._hosts:
            ray.kill(host, no_restart=True)
        if self._listening.ident is not None:
            self._listening.join(_GRACE_S)  # it ends when all workers have
            # A worker that is stopped (SIGSTOP) cannot exit by itself, and Ray kills it only after 5 s.
            here = ray.util.get_node_ip_address()
            kill(process.pid for process in self._processes if process.node == here)
            self._listens = False
            self._listening.join(
                _GRACE_S
            )  # longer only while it waits for a report of a machine that is gone

    def _listen(self) -> None:
        """Log the workers' reports, and note which workers are lost."""
        rank_of: dict[Any, int] = {host.reports.remote(): rank for rank, host in enumerate(self._hosts)}
        kills = KillCount()
        made, logged = Counter[tuple[int, Report]](), Counter[Report]()
        while rank_of and self._listens:
            ready, _ = ray.wait(list(rank_of), timeout=_LISTEN_S)
            for stream in cast("list[Any]", ready):
                rank = rank_of[stream]
                try:
                    report = cast("Report", ray.get(next(stream)))
                except RayError as error:
                    del rank_of[stream]
                    _losses.add(Loss(self, rank, error=error, is_oom=kills.has_risen()))
                    continue
                made[rank, report] += 1
                if report.level is None:
                    _losses.add(Loss(self, rank, said=report.text))
                elif made[rank, report] > logged[report]:  # no other rank has said it as often
                    logged[report] += 1
                    logger.log(report.level, "%s: %s", self._name(rank), report.text)
            kills.update()

    def _wait(self, calls: Sequence[Any], ranks: Sequence[int], doing: str, deadline: float) -> list[Any]:
        """Results by rank."""
        self._watch(dict(zip(calls, ranks, strict=True)), doing, deadline)
        return ray.get(list(calls))

    def _watch(
        self,
        rank_of: Mapping[Any, int],
        doing: str,
        deadline: float,
        *,
        is_any: bool = False,
        until: float | None = None,
    ) -> list[Any]:
        """Wait for calls, or until one has finished, or `until` then; returns the others. The first failure
        closes the group, whose other ranks may be waiting for the failed one. So does the loss of a worker of
        any group, since the run needs all groups."""
        pending = list(rank_of)
        ends = deadline if until is None else until
        while pending and not (is_any and len(pending) < len(rank_of)):
            done, pending = ray.wait(pending, timeout=max(0.0, min(_TICK_S, ends - time.monotonic())))
            errors = {rank_of[call]: error for call in done if (error := _error_of(call)) is not None}
            if errors or _losses.first() is not None:
                self._fail(errors, doing)
            if until is not None and time.monotonic() >= until:
                break
            if not done and time.monotonic() >= deadline:
                late = [rank_of[call] for call in pending]
                where = "; ".join(self._where(rank) for rank in late)
                self.close()
                raise WorkerError(
                    f"{self.role} workers {', '.join(map(str, late))} of {self.size} did not answer in time "
                    f"while {doing}",
                    f"{where}; raise cluster.call_timeout_s if they need more time",
                )
        return pending

    def _fail(self, errors: Mapping[int, RayError], doing: str) -> NoReturn:
        """Close the group and raise the WorkerError of the cause: a lost worker takes precedence over
        exceptions of other workers, which may follow from it."""
        loss = _losses.first(_GRACE_S if errors else 0.0)
        if loss is None:
            rank, error = min(errors.items(), key=lambda item: not _is_death(item[1]))
            if not _is_death(error):
                self.close()
                raise WorkerError(
                    f"{self._name(rank)} failed while {doing}",
                    f"{_told(error)} ({self._where(rank)})",
                    _raised(error),
                ) from error
            loss = Loss(self, rank, error=error)
        group, rank = loss.group, loss.rank
        if loss.said is None and (raylet := group._lost_raylet(loss)) is not None:
            self.close()
            raise WorkerError(
                f"Ray's raylet died while {group._name(rank)} was {doing}",
                f"{raylet}, and the workers on that machine ended with it; its logs are in the folder logs "
                "of Ray's session (/tmp/ray/session_latest)",
            )
        if loss.said is None:
            what, why = "died", group._end_of(loss)
        else:
            what, why = "cannot continue", f"{loss.said} ({group._where(rank)})"
        if group is not self:
            doing = f"{self.role} was {doing}"
            why += f"; its last call was {group._asked[rank]}" * bool(group._asked[rank])
        self.close()
        raise WorkerError(
            f"{group._name(rank)} {what} while {doing}",
            why,
            None if loss.said is None else EngineError(loss.said),
        )

    def _end_of(self, loss: Loss) -> str:
        """How a dead process ended: Ray's information, and its last log lines."""
        how = _ENDED if loss.error is None else _told(loss.error)
        if loss.is_oom or isinstance(loss.error, OutOfMemoryError):
            how = f"it ran out of memory and was killed: {_LESS_MEMORY}"
        words = self._last_words(loss.rank)
        return f"{how} ({self._where(loss.rank)})" + (f"; last log lines: {words}" if words else "")

    def _lost_raylet(self, loss: Loss) -> str | None:
        """The raylet of a lost worker, if it has died itself; None if it runs, or if nothing is known of
        it."""
        if not self._processes:
            return None
        process = self._processes[loss.rank]
        is_here = process.node == ray.util.get_node_ip_address() and Path("/proc/self").exists()
        if is_here and not is_running(process.raylet):
            return f"pid {process.raylet} on {process.node} was killed or crashed"
        return None

    def _name(self, rank: int) -> str:
        return f"{self.role} worker {rank} of {self.size}"

    def _where(self, rank: int) -> str:
        if not self._processes:
            return "not started yet"
        process = self._processes[rank]
        return f"{process}, log {process.log}" if process.log else str(process)

    def _last_words(self, rank: int) -> str:
        """The last lines of a worker's log; empty if this machine cannot read it."""
        if not self._processes or not self._processes[rank].log:
            return ""
        try:
            data = Path(self._processes[rank].log).read_bytes()[self._processes[rank].start :]
        except OSError:
            return ""
        text = data.decode("utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(":")]
        return " | ".join(lines[-_NUM_LAST_LINES:])


class _Added(WorkerGroup[W]):
    """Further workers in the processes of a RayGroup."""

    def __init__(self, processes: RayGroup[Any], name: str) -> None:
        self.role, self.size, self._processes = name, processes.size, processes

    def _start(self, call: Call) -> _Pending:
        return self._processes._start(call, self.role)

    def wait_any(self, pending: Sequence[Pending[T]], within_s: float | None = None) -> Sequence[Pending[T]]:
        """Wait for the calls as the group that owns the processes does."""
        return self._processes.wait_any(pending, within_s)

    def is_done(self, call: Pending[Any], within_s: float) -> bool:
        """Whether all ranks have finished the call, after waiting for `within_s` seconds at most."""
        return self._processes.is_done(call, within_s)

    def add(self, name: str, factory: Factory[T]) -> WorkerGroup[T]:
        """Create another worker in each of the same processes."""
        return self._processes.add(name, factory)

    def close(self) -> None:
        """Free the workers; their processes go on."""
        self._processes._drop(self.role)


def _is_death(error: RayError) -> bool:
    return isinstance(error, RayActorError | OutOfMemoryError)


def _error_of(call: Any) -> RayError | None:
    """The error of a call; None if it succeeded or has not finished."""
    try:
        ray.get(call, timeout=0)
    except GetTimeoutError:
        return None
    except RayError as error:
        return error
    return None


def _raised(error: RayError) -> BaseException | None:
    """The exception that the worker's code raised; None if it only reports the death of another worker."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return None if isinstance(cause, RayError) else cause


def _told(error: RayError) -> str:
    """Message of a worker's exception, in full for braid's errors, or how its process ended."""
    if isinstance(raised := _raised(error), BraidError):
        return f"{type(raised).__name__}: {raised}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    if "Worker unexpectedly exits with a connection error" in last:
        return _ENDED
    return last.rpartition("Worker exit detail: ")[2]
