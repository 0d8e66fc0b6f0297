"""Gymnasium environments in child processes: they step in parallel, and every call has a deadline.

A process that misses a deadline is killed with all that it has started. Like the death of a process, this fails the
slots of the call; episodes in other slots of the process fail at their next step. The next reset of one of its slots
starts it again. A child process (`main`) holds a GymnasiumSimulator. It ends with its parent.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper
from numpy.typing import NDArray

from braid.errors import BraidError, ConfigError, EnvError, Problem
from braid.processes import descendants, end_with, kill, kill_group
from braid.types import Spaces

from .base import Tick
from .gymnasium import GymnasiumSimulator
from .rules import EpisodeRules

logger = logging.getLogger(__name__)

_LONGEST_S = 1e6
"""Longest timeout that the system calls below accept."""
_CLOSE_S = 10.0
"""Longest timeout of `close`, so that interrupting a run whose environment hangs does not take minutes."""
_EXIT_S = 1.0
"""Time for a process to exit once its connection is closed."""
_GRACE_S = 10.0
"""A child process ends itself this long after a deadline, if the parent has not killed it before."""


class SimulatorProcesses:
    """`num_envs` copies of one environment, divided among child processes. See base.Simulator."""

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        kwargs: Mapping[str, Any] | None = None,
        *,
        base_dir: Path = Path(),
        rules: EpisodeRules = EpisodeRules(),
        num_processes: int = 1,
        timeout_s: float,
    ) -> None:
        """Each call, and the start of a process, has to end within `timeout_s` (rollout.env_timeout_s). Raises
        ConfigError like GymnasiumSimulator, and EnvError if a process cannot be started."""
        self.timeout_s = timeout_s
        environment = _pickled(env_id, kwargs or {}, base_dir, rules)
        count = min(num_processes, num_envs)
        bounds = [number * num_envs // count for number in range(count + 1)]
        self._processes = [
            _Process(env_id, environment, range(first, last)) for first, last in pairwise(bounds)
        ]
        if errors := self._start(self._processes):
            self.close()
            raise errors[0]
        self.num_envs = num_envs
        self.spaces: Spaces = self._processes[0].spaces

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Tick:
        named = [process for process in self._processes if any(slot in process.slots for slot in seeds)]
        for error in self._start(process for process in named if not process.is_running):
            logger.warning("%s", error)
        for process in named:
            if process.is_running:
                process.lost = {slot: why for slot, why in process.lost.items() if slot not in seeds}
        return self._call("reset", seeds, list, 0, filmed)

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        return self._call("step", actions, np.asarray, max(map(len, actions.values()), default=0))

    def close(self) -> None:
        running = [process for process in self._processes if process.is_running]
        for process in running:
            process.ask("close", timeout_s=min(self.timeout_s, _CLOSE_S))
        for process in running:
            try:
                process.answer()
            except EnvError as error:
                logger.warning("%s", error)
            process.end(_EXIT_S)

    def _start(self, processes: Iterable[_Process]) -> list[BraidError]:
        """Start the processes; returns the errors of those that fail."""
        started, errors = list(processes), []
        for process in started:
            process.start(self.timeout_s)
        for process in started:
            try:
                process.spaces = process.answer()
            except BraidError as error:
                errors.append(error)
        return errors

    def _call(
        self,
        method: str,
        by_slot: Mapping[int, Any],
        packed: Callable[[list[Any]], Any],
        num_actions: int,
        filmed: Collection[int] = (),
    ) -> Tick:
        """Call the method with the slots' arguments, in all their processes in parallel."""
        tick = Tick.empty(self.num_envs, self.spaces, num_actions)
        failures = tick.failures
        asked: list[tuple[_Process, list[int]]] = []
        for process in self._processes:
            named = [slot for slot in by_slot if slot in process.slots]
            failures |= {slot: process.lost[slot] for slot in named if slot in process.lost}
            if live := [slot for slot in named if slot not in process.lost]:
                local = [slot - process.slots.start for slot in live]
                values = packed([by_slot[slot] for slot in live])
                films = [[slot - process.slots.start for slot in live if slot in filmed]] if filmed else []
                process.ask(method, local, values, *films, timeout_s=self.timeout_s)
                asked.append((process, live))
        for process, live in asked:
            first, last = process.slots.start, process.slots.stop
            try:
                part: Tick = process.answer()
            except EnvError as error:
                logger.warning("%s", error)
                failures |= dict.fromkeys(live, str(error))
                continue
            for name, values in part.observations.items():
                tick.observations[name][first:last] = values
            for name in ("rewards", "num_executed", "is_terminated", "is_truncated", "success"):
                getattr(tick, name)[first:last] = getattr(part, name)
            for whole, local in (
                (failures, part.failures),
                (tick.instructions, part.instructions),
                (tick.frames, part.frames),
            ):
                whole |= {first + slot: of for slot, of in local.items()}
        return tick


class _Process:
    """A child process with the environments of `slots`, and the connection to it. `lost` says for each slot whose
    episode ended with the process why."""

    def __init__(self, env_id: str, environment: bytes, slots: range) -> None:
        self.slots = slots
        self.lost: dict[int, str] = {}
        self.spaces: Any = None
        self._env_id, self._environment = env_id, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0  # of the last request

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, timeout_s: float) -> None:
        """Start the process. The answer is its spaces."""
        ours, theirs = socket.socketpair()
        # A process that stops in the middle of a message must not block this one for ever.
        limit = struct.pack("ll", math.ceil(min(timeout_s, _LONGEST_S)), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        self._connection = Connection(ours.detach())
        with theirs:
            numbers = [str(number) for number in (theirs.fileno(), os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *numbers],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,
            )
        self._handle = os.pidfd_open(self._process.pid)
        self._events = select.poll()
        for source in (self._connection, self._handle):
            self._events.register(source, select.POLLIN)
        self.ask("start", self._env_id, len(self.slots), self._environment, timeout_s=timeout_s)

    def ask(self, method: str, *arguments: object, timeout_s: float) -> None:
        """Send a request, which has to be answered within `timeout_s`."""
        self._number, self._method = self._number + 1, method
        self._limit_s = min(timeout_s, _LONGEST_S)
        self._deadline = time.monotonic() + self._limit_s
        with suppress(OSError):  # the answer will tell
            self._connection.send_bytes(pickle.dumps((self._number, method, self._limit_s, arguments), 5))

    def answer(self) -> Any:
        """The answer to the last request. Raises EnvError, or ConfigError of a start, if that is an error, the
        process dies, or the deadline passes; then all slots are lost, and what is left of the process is killed."""
        try:
            value = self._receive()
        except (EOFError, OSError) as failure:
            value = EnvError(f"{self._env_id}: {self._end_for(failure)}")
        if isinstance(value, BraidError):
            self.end()
            self.lost = dict.fromkeys(self.slots, str(value))
            raise value
        return value

    def _receive(self) -> Any:
        while True:
            left_s = max(0.0, self._deadline - time.monotonic())
            ready = dict(self._events.poll(math.ceil(1e3 * left_s)))
            if not ready:
                raise TimeoutError
            if self._connection.fileno() not in ready:
                raise EOFError
            number, value = pickle.loads(self._connection.recv_bytes())
            if number == self._number:  # an interrupted call leaves its answer behind
                return value

    def _end_for(self, failure: Exception) -> str:
        """End the process; returns what happened to it."""
        if isinstance(failure, TimeoutError | BlockingIOError):
            self.end()
            key = "" if self._method == "close" else " (rollout.env_timeout_s)"
            return f"{self._method} took longer than {self._limit_s:g} s{key}"
        code = self.end(_EXIT_S)
        how = f"exited with code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"the process {how} during {self._method}"

    def end(self, wait_s: float = 0.0) -> int:
        """Close the connection, at which the process exits, and after `wait_s` kill it and all that it has started;
        returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        self._connection.close()
        select.select([self._handle], [], [], wait_s)
        started = descendants(process.pid)
        kill_group(process.pid)
        kill(started)
        os.close(self._handle)
        return process.wait()


def _pickled(env_id: str, kwargs: Mapping[str, Any], base_dir: Path, rules: EpisodeRules) -> bytes:
    """The environment for a child process, with its registration here, which may be that of a script or notebook."""
    name = env_id.split("-v")[0]
    specs = {key: spec for key, spec in gymnasium.registry.items() if key.split("-v")[0] == name}
    try:
        return pickle.dumps(CloudpickleWrapper((dict(kwargs), specs, base_dir, rules)))  # pyright: ignore[reportArgumentType]
    except Exception as error:
        why = f"{env_id} cannot be sent to another process ({error}); set it to 0"
        raise ConfigError([Problem("env.processes", why, "env")]) from error


def main(connection: Connection, parent: int) -> None:
    """Serve the environments of one process until the parent closes the connection. Then kill what they have
    started, since the parent may be gone, and this process."""
    end_with(parent)
    simulator: GymnasiumSimulator | None = None
    try:
        while (request := _received(connection)) is not None:
            number, method, limit_s, arguments = pickle.loads(request)
            # The default action ends the process, even where an environment holds the GIL.
            signal.setitimer(signal.ITIMER_REAL, limit_s + _GRACE_S)
            answer: Any
            if simulator is None:
                answer, simulator = _made(*arguments)
            elif method == "close":
                answer = simulator.close()
            else:
                slots, values, *filmed = arguments
                answer = getattr(simulator, method)(dict(zip(slots, values, strict=True)), *filmed)
            signal.setitimer(signal.ITIMER_REAL, 0)
            with suppress(ConnectionError):
                connection.send_bytes(pickle.dumps((number, answer), 5))
    finally:
        if simulator is not None:
            simulator.close()
    sys.stdout.flush()
    kill_group(os.getpgrp())


def _received(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionError):
        return None


def _made(env_id: str, num_envs: int, environment: bytes) -> tuple[Any, GymnasiumSimulator | None]:
    """The simulator, after its spaces; or an error and None."""
    try:
        kwargs, specs, base_dir, rules = pickle.loads(environment).fn
        gymnasium.registry.update(specs)
        simulator = GymnasiumSimulator(env_id, num_envs, kwargs, base_dir=base_dir, rules=rules)
    except ConfigError as error:
        return error, None
    except Exception as error:
        traceback.print_exc()
        return EnvError(f"{env_id} cannot be created: {type(error).__name__}: {error}"), None
    return simulator.spaces, simulator


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
