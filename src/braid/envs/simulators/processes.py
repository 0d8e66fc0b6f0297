"""Gymnasium environments in child processes: they step in parallel, and every call has a deadline.

A process (braid.processes) that misses a deadline is killed with all that it has started. Like the death of
a process, this fails the slots of the call; episodes in other slots of the process fail at their next step.
The next reset of one of its slots starts it again. A child process (`main`) holds a GymnasiumSimulator.
Images come back in memory that both share; everything else in messages.
"""

from __future__ import annotations

import logging
import pickle
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper
from numpy.typing import NDArray

from braid.cores import num_threads
from braid.errors import BraidError, ConfigError, EnvError, Problem
from braid.processes import Channel, Child, connect, end_this_process
from braid.processes.memory import SharedArrays
from braid.types import Spaces
from braid.users import as_env_error

from .base import AS_IT_IS, EpisodeRules, Tick
from .gymnasium import GymnasiumSimulator
from .vector import make_simulator

logger = logging.getLogger(__name__)

_LONGEST_S = 1e6
"""Longest timeout that the timer of a process accepts."""
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
        self._child: Child | None = None
        self._number = self._first = 0  # of the last request, and of the start
        self._requests: dict[int, _Request] = {}
        self._end = ""

    @property
    def is_running(self) -> bool:
        return self._child is not None

    def start(self, timeout_s: float) -> None:
        """Start the process. The answer is its `spaces` and `resets_together`."""
        self._memory = SharedArrays()
        memory = self._memory.descriptor
        self._child = Child(
            __name__,
            str(memory),
            inherited=[memory],
            stdout=None,
            stderr=None,
            env={"OMP_NUM_THREADS": str(self._threads)},
        )
        self._requests = {}
        self._first = self.ask("start", self._env_id, len(self.slots), self._environment, timeout_s=timeout_s)

    def started(self) -> None:
        """Wait for the start. Raises like `answer`."""
        self.spaces, self.resets_together = self.answer(self._first)
        self.images = _images(self._memory, self.spaces, len(self.slots))

    def ask(self, method: str, *arguments: object, timeout_s: float) -> int:
        """Send a request, which has to be answered within `timeout_s` after those before it; returns its
        number."""
        self._number += 1
        limit_s = min(timeout_s, _LONGEST_S)
        begin = max([time.monotonic(), *(request.deadline for request in self._requests.values())])
        self._requests[self._number] = _Request(method, limit_s, begin + limit_s)
        assert self._child is not None, "`start` comes first"
        with suppress(OSError), self._until_cut():  # the answer will tell
            request = pickle.dumps((self._number, method, limit_s, arguments), 5)
            self._child.channel.send(request, begin + limit_s)
        return self._number

    @contextmanager
    def _until_cut(self) -> Iterator[None]:
        """An interrupt in the middle of a message, which ends the connection, ends the process."""
        try:
            yield
        except KeyboardInterrupt:
            if self._child is not None and self._child.channel.is_shut:
                self._lose(f"{self._env_id}: a call to the process was interrupted")
            raise

    def _lose(self, why: str) -> None:
        """End the process, and with it the episodes of its slots."""
        self.end()
        self._end = why
        self.lost = dict.fromkeys(self.slots, why)

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
            with self._until_cut():
                value = self._receive(number, request.deadline)
        except (EOFError, OSError) as failure:
            value = EnvError(f"{self._env_id}: {self._end_for(failure, request)}")
        self._requests = {later: pending for later, pending in self._requests.items() if later > number}
        if isinstance(value, BraidError):
            self._lose(str(value))
            raise value
        return value

    def _receive(self, wanted: int, deadline: float) -> Any:
        assert self._child is not None, "requests are those of a process"
        while True:
            number, value = pickle.loads(self._child.channel.receive(deadline))
            if number == wanted:  # an interrupted call leaves its answer behind
                return value

    def _end_for(self, failure: Exception, request: _Request) -> str:
        """End the process; returns what happened to it."""
        if isinstance(failure, TimeoutError):
            self.end()
            key = "" if request.method == "close" else " (rollout.env_timeout_s)"
            return f"{request.method} took longer than {request.limit_s:g} s{key}"
        return f"the process {self.end(_EXIT_S)} during {request.method}"

    def end(self, wait_s: float = 0.0) -> str:
        """End the process as Child.end does, if there is one; returns how it ended."""
        child, self._child, self._requests = self._child, None, {}
        if child is None:
            return "has ended"
        self._memory.close()
        self.images = {}
        return child.end(wait_s)


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


def _images(memory: SharedArrays, spaces: Spaces, num_envs: int) -> dict[str, NDArray[np.uint8]]:
    """Arrays [E, ...] by name."""
    return memory.map({name: (num_envs, *shape) for name, shape in spaces.images.items()})


def main(channel: Channel, memory: SharedArrays) -> None:
    """Serve the environments of one process until the parent closes the connection. Then kill what they have
    started, since the parent may be gone, and this process."""
    simulator: GymnasiumSimulator | None = None
    try:
        for request in channel.messages():
            number, method, limit_s, arguments = pickle.loads(request)
            # The default action ends the process, even where an environment holds the GIL.
            signal.setitimer(signal.ITIMER_REAL, limit_s + _GRACE_S)
            answer: Any
            if simulator is None:
                answer, simulator = _made(*arguments)
                if simulator is not None:
                    simulator.image_memory = _images(memory, simulator.spaces, simulator.num_envs)
            elif method == "close":
                answer = simulator.close()
            else:
                slots, values, *filmed = arguments
                tick = getattr(simulator, method)(dict(zip(slots, values, strict=True)), *filmed)
                in_message = {name: data for name, data in tick.observations.items() if name == "state"}
                answer = replace(tick, observations=in_message)
            signal.setitimer(signal.ITIMER_REAL, 0)
            channel.reply(pickle.dumps((number, answer), 5))
    finally:
        if simulator is not None:
            simulator.close()
    sys.stdout.flush()
    end_this_process()


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
    channel, (descriptor,) = connect()
    main(channel, SharedArrays(int(descriptor)))
