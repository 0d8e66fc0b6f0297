"""Gymnasium environments in child processes: they step in parallel, and every call has a deadline.

A process that misses a deadline is killed with all that it has started. Like the death of a process, this
fails the slots of the call; episodes in other slots of the process fail at their next step. The next reset of
one of its slots starts it again. A child process (`main`) holds a GymnasiumSimulator. It ends with its
parent. Images come back in memory that both share, which the system frees with the last of both; everything
else in messages.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper
from numpy.typing import NDArray

from braid.children import as_env_error
from braid.cores import num_threads
from braid.errors import BraidError, ConfigError, EnvError, Problem
from braid.processes import end, end_with, how_it_ended, kill_group, start_module
from braid.types import Spaces

from .base import AS_IT_IS, EpisodeRules, Tick
from .gymnasium import GymnasiumSimulator
from .vector import make_simulator

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
        rules: EpisodeRules = AS_IT_IS,
        is_vectorized: bool = False,
        num_processes: int = 1,
        timeout_s: float,
    ) -> None:
        """Each call, and the start of a process, has to end within `timeout_s` (rollout.env_timeout_s).
        Raises ConfigError like GymnasiumSimulator, and EnvError if a process cannot be started."""
        self.timeout_s = timeout_s
        environment = _pickled(env_id, kwargs or {}, base_dir, rules, is_vectorized)
        count = min(num_processes, num_envs)
        threads = max(1, num_threads() // count)
        bounds = [number * num_envs // count for number in range(count + 1)]
        self._processes = [
            _Process(env_id, environment, range(first, last), threads) for first, last in pairwise(bounds)
        ]
        if errors := self._start(self._processes):
            self.close()
            raise errors[0]
        self.num_envs = num_envs
        self.spaces: Spaces = self._processes[0].spaces
        self.resets_together = self._processes[0].resets_together

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Tick:
        return self.begin_reset(seeds, filmed)()

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        return self.begin_step(actions)()

    def begin_reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Callable[[], Tick]:
        """Begin a reset in the processes of these slots, and start those that have ended again; returns the
        function that waits for it."""
        named = [process for process in self._processes if any(slot in process.slots for slot in seeds)]
        for error in self._start(process for process in named if not process.is_running):
            logger.warning("%s", error)
        for process in named:
            if process.is_running:
                process.lost = {slot: why for slot, why in process.lost.items() if slot not in seeds}
        return self._begin("reset", seeds, list, 0, filmed)

    def begin_step(self, actions: Mapping[int, NDArray]) -> Callable[[], Tick]:
        """Begin a step in the processes of these slots; returns the function that waits for it."""
        return self._begin("step", actions, np.asarray, max(map(len, actions.values()), default=0))

    def close(self) -> None:
        """End all processes. A later reset starts them again."""
        running = [process for process in self._processes if process.is_running]
        for process in running:
            process.forget()
        asked = [process.ask("close", timeout_s=min(self.timeout_s, _CLOSE_S)) for process in running]
        for process, number in zip(running, asked, strict=True):
            try:
                process.answer(number)
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
                process.started()
            except BraidError as error:
                errors.append(error)
        return errors

    def _begin(
        self,
        method: str,
        by_slot: Mapping[int, Any],
        packed: Callable[[list[Any]], Any],
        num_actions: int,
        filmed: Collection[int] = (),
    ) -> Callable[[], Tick]:
        """Call the method with the slots' arguments, in all their processes in parallel; returns what waits
        for the result."""
        tick = Tick.empty(self.num_envs, self.spaces, num_actions)
        failures = tick.failures
        asked: list[_Asked] = []
        for process in self._processes:
            named = [slot for slot in by_slot if slot in process.slots]
            failures |= {slot: process.lost[slot] for slot in named if slot in process.lost}
            if live := [slot for slot in named if slot not in process.lost]:
                local = [slot - process.slots.start for slot in live]
                values = packed([by_slot[slot] for slot in live])
                films = [[slot - process.slots.start for slot in live if slot in filmed]] if filmed else []
                number = process.ask(method, local, values, *films, timeout_s=self.timeout_s)
                asked.append(_Asked(process, number, live))
        return lambda: self._finish(tick, asked)

    def _finish(self, tick: Tick, asked: Sequence[_Asked]) -> Tick:
        for process, number, live in asked:
            try:
                part: Tick = process.answer(number)
            except EnvError as error:
                logger.warning("%s", error)
                tick.failures.update(dict.fromkeys(live, str(error)))
                continue
            tick.take(part, process.slots.start)
            process.copy_images(live, tick)
        return tick


class _Request(NamedTuple):
    """A request that is not answered yet; `deadline` in seconds of the monotonic clock."""

    method: str
    limit_s: float
    deadline: float


class _Asked(NamedTuple):
    """Request `number` to a process, of the slots `live`."""

    process: _Process
    number: int
    live: list[int]


class _Process:
    """A child process with the environments of `slots`, and the connection to it. `lost` says for each slot
    whose episode ended with the process why; `images` are arrays [slots, ...] that it writes. `threads`: of
    its numerical libraries."""

    def __init__(self, env_id: str, environment: bytes, slots: range, threads: int) -> None:
        self.slots = slots
        self.lost: dict[int, str] = {}
        self.spaces: Any = None
        self.images: Mapping[str, NDArray[np.uint8]] = {}
        self.resets_together = False
        self._env_id, self._environment, self._threads = env_id, environment, threads
        self._process: subprocess.Popen[bytes] | None = None
        self._number = self._first = 0  # of the last request, and of the start
        self._requests: dict[int, _Request] = {}
        self._end = ""

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, timeout_s: float) -> None:
        """Start the process. The answer is its `spaces` and `resets_together`."""
        ours, theirs = socket.socketpair()
        # A process that stops in the middle of a message must not block this one for ever.
        limit = struct.pack("ll", math.ceil(min(timeout_s, _LONGEST_S)), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        self._connection = Connection(ours.detach())
        self._memory = os.memfd_create("braid-images")
        with theirs:
            descriptors = [theirs.fileno(), self._memory]
            self._process = start_module(__name__, descriptors, OMP_NUM_THREADS=str(self._threads))
        self._handle = os.pidfd_open(self._process.pid)
        self._events = select.poll()
        for source in (self._connection, self._handle):
            self._events.register(source, select.POLLIN)
        self._requests = {}
        self._first = self.ask("start", self._env_id, len(self.slots), self._environment, timeout_s=timeout_s)

    def started(self) -> None:
        """Wait for the start. Raises like `answer`."""
        self.spaces, self.resets_together = self.answer(self._first)
        self.images = _shared_images(self._memory, self.spaces, len(self.slots))

    def ask(self, method: str, *arguments: object, timeout_s: float) -> int:
        """Send a request, which has to be answered within `timeout_s` after those before it; returns its
        number."""
        self._number += 1
        limit_s = min(timeout_s, _LONGEST_S)
        begin = max([time.monotonic(), *(request.deadline for request in self._requests.values())])
        self._requests[self._number] = _Request(method, limit_s, begin + limit_s)
        with suppress(OSError):  # the answer will tell
            self._connection.send_bytes(pickle.dumps((self._number, method, limit_s, arguments), 5))
        return self._number

    def copy_images(self, slots: Sequence[int], tick: Tick) -> None:
        local = [slot - self.slots.start for slot in slots]
        for name, values in self.images.items():
            tick.observations[name][slots] = values[local]

    def forget(self) -> None:
        """Drop the requests that are not answered yet."""
        self._requests = {}

    def answer(self, number: int) -> Any:
        """The answer to a request. Raises EnvError, or ConfigError of a start, if that is an error, the
        process dies, or the deadline passes; then all slots are lost, and what is left of the process is
        killed."""
        if number not in self._requests:  # the process has ended since
            raise EnvError(self._end)
        request = self._requests[number]
        try:
            value = self._receive(number, request.deadline)
        except (EOFError, OSError) as failure:
            value = EnvError(f"{self._env_id}: {self._end_for(failure, request)}")
        self._requests = {later: pending for later, pending in self._requests.items() if later > number}
        if isinstance(value, BraidError):
            self.end()
            self._end = str(value)
            self.lost = dict.fromkeys(self.slots, self._end)
            raise value
        return value

    def _receive(self, wanted: int, deadline: float) -> Any:
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            ready = dict(self._events.poll(math.ceil(1e3 * left_s)))
            if not ready:
                raise TimeoutError
            if self._connection.fileno() not in ready:
                raise EOFError
            number, value = pickle.loads(self._connection.recv_bytes())
            if number == wanted:  # an interrupted call leaves its answer behind
                return value

    def _end_for(self, failure: Exception, request: _Request) -> str:
        """End the process; returns what happened to it."""
        if isinstance(failure, TimeoutError | BlockingIOError):
            self.end()
            key = "" if request.method == "close" else " (rollout.env_timeout_s)"
            return f"{request.method} took longer than {request.limit_s:g} s{key}"
        return f"the process {how_it_ended(self.end(_EXIT_S))} during {request.method}"

    def end(self, wait_s: float = 0.0) -> int:
        """Close the connection, at which the process exits, and after `wait_s` kill it and all that it has
        started; returns its exit code."""
        process, self._process, self._requests = self._process, None, {}
        if process is None:
            return 0
        self._connection.close()
        os.close(self._memory)
        self.images = {}
        select.select([self._handle], [], [], wait_s)
        os.close(self._handle)
        return end(process)


def _pickled(env_id: str, kwargs: Mapping[str, Any], *arguments: object) -> bytes:
    """The environment for a child process, with its registration here, which may be that of a script or
    notebook."""
    name = env_id.split("-v")[0]
    specs = {key: spec for key, spec in gymnasium.registry.items() if key.split("-v")[0] == name}
    try:
        return pickle.dumps(CloudpickleWrapper((dict(kwargs), specs, *arguments)))  # pyright: ignore[reportArgumentType]
    except Exception as error:
        why = f"{env_id} cannot be sent to another process ({error}); set it to 0"
        raise ConfigError([Problem("env.processes", why, "env")]) from error


def _shared_images(memory: int, spaces: Spaces, num_envs: int) -> dict[str, NDArray[np.uint8]]:
    """Arrays [E, ...] by name in shared memory, which the first call makes large enough."""
    shapes = {name: (num_envs, *shape) for name, shape in spaces.images.items()}
    if not shapes:
        return {}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()
    os.ftruncate(memory, ends[-1])
    whole = np.frombuffer(mmap.mmap(memory, ends[-1]), np.uint8)
    parts = np.split(whole, ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def main(connection: Connection, memory: int, parent: int) -> None:
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
                if simulator is not None:
                    simulator.image_memory = _shared_images(memory, simulator.spaces, simulator.num_envs)
            elif method == "close":
                answer = simulator.close()
            else:
                slots, values, *filmed = arguments
                tick = getattr(simulator, method)(dict(zip(slots, values, strict=True)), *filmed)
                in_message = {name: data for name, data in tick.observations.items() if name == "state"}
                answer = replace(tick, observations=in_message)
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
    """The simulator, after its spaces and whether it resets together; or an error and None."""
    try:
        kwargs, specs, base_dir, rules, is_vectorized = pickle.loads(environment).fn
        gymnasium.registry.update(specs)
        simulator = make_simulator(
            env_id, num_envs, kwargs, base_dir=base_dir, rules=rules, is_vectorized=is_vectorized
        )
    except BraidError as error:
        return error, None
    except Exception as error:
        return EnvError(f"{env_id} cannot be sent to a process: {as_env_error(error)}"), None
    return (simulator.spaces, simulator.resets_together), simulator


if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]]
    for descriptor in numbers[:2]:
        os.set_inheritable(descriptor, False)
    main(Connection(numbers[0]), *numbers[1:])
