"""Where environments run: on the event loop, in threads, or in processes.

A hosted environment is an AgentEnv around a user's or an adapter's, whose methods may be plain functions: a
factory makes one for each episode. Deadlines are the caller's: it cancels a call that takes too long.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

import numpy as np

from braid.errors import BraidError, EnvError
from braid.types import Action, Prompt
from braid.users import as_env_error, is_the_users

from .base import Opening, Step
from .processes import EnvProcess

RunIn = Literal["inline", "thread", "process"]
MakeEnv = Callable[[], Any]


class HostedEnvs:
    """Makes hosted environments, one for each episode. For processes `make` must be picklable;
    `num_processes` of them are shared by all episodes, and started when needed."""

    def __init__(self, make: MakeEnv, run_in: RunIn, num_processes: int) -> None:
        self._make, self._run_in = make, run_in
        self._pool = ProcessPool(partial(_Episodes, make, seeds_globals=True), num_processes)

    def __call__(self) -> HostedEnv:
        if self._run_in == "process":
            return ProcessEnv(self._pool)
        return InlineEnv(self._make) if self._run_in == "inline" else ThreadEnv(self._make)

    async def close(self) -> None:
        """Kill the processes without an episode, and others when theirs is closed."""
        self._pool.close()


class HostedEnv(ABC):
    """See base.AgentEnv. `ready` may be awaited before `start`, without a deadline."""

    _is_running = False

    async def ready(self, task: Prompt | None = None) -> None:  # noqa: B027  # there is no wait elsewhere
        """Wait for a free process, which takes as long as other episodes do."""

    async def start(self, task: Prompt, seed: int) -> Opening:
        """See AgentEnv. The environment is made here."""
        await self.ready(task)
        with _UsersErrors():
            opening = self._call("start", task, seed)
            if inspect.isawaitable(opening):
                opening = await opening
        opening = _checked(opening, Opening, "start")
        self._is_running = True
        return opening

    async def step(self, action: Action) -> Step:
        """See AgentEnv. Raises EnvError before the start and after the end of the episode, where libraries go
        on giving rewards."""
        if not self._is_running:
            raise EnvError("step() before the start or after the end of the episode")
        with _UsersErrors():
            step = self._call("step", action)
            if inspect.isawaitable(step):
                step = await step
        step = _checked(step, Step, "step")
        self._is_running = not (step.is_done or step.is_truncated)
        return step

    async def close(self) -> None:
        """See AgentEnv. Idempotent."""
        self._is_running = False
        await self._close()

    @abstractmethod
    def _call(self, method: str, *arguments: Any) -> Any:
        """The value of the environment's method, or what to await for it."""

    @abstractmethod
    async def _close(self) -> None: ...


class _UsersErrors:
    """Raises what the user's code raises in the block as EnvError. A class, since a context manager that is a
    generator lets a StopIteration pass."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, BraidError) and is_the_users(error):
            raise as_env_error(error) from error


def _checked(value: Any, kind: type, method: str) -> Any:
    if not isinstance(value, kind):
        raise EnvError(f"{method}() returned {type(value).__name__}, not {kind.__name__}")
    return value


class InlineEnv(HostedEnv):
    """Runs on the event loop, for methods that are async or take microseconds."""

    def __init__(self, make: MakeEnv) -> None:
        self._make, self._env = make, None

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "start":
            self._env = self._make()
        return getattr(self._env, method)(*arguments)

    async def _close(self) -> None:
        if self._env is not None:
            try:
                with _UsersErrors():
                    value = self._call("close")
                    if inspect.isawaitable(value):
                        await value
            finally:
                self._env = None


class ThreadEnv(HostedEnv):
    """Runs in a thread of its own. A call that hangs keeps the thread, which does not keep the process from
    exiting; the environment is closed when the call returns."""

    def __init__(self, make: MakeEnv) -> None:
        self._episodes = _Episodes(make)
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._last: Future[Any] | None = None

    def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        if self._last is None:
            Thread(target=_serve, args=(self._jobs,), name="braid-env", daemon=True).start()
        self._last = self._put(method, *arguments)
        return asyncio.wrap_future(self._last)

    def _put(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._jobs.put((partial(getattr(self._episodes, method), *arguments), future))
        return future

    async def _close(self) -> None:
        if (last := self._last) is None:
            return
        self._last = None
        closed = self._put("close")
        self._jobs.put(None)
        if last.done():
            await asyncio.wrap_future(closed)


def _serve(jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (job := jobs.get()) is not None:
        call, future = job
        try:
            future.set_result(call())
        except BaseException as error:  # a future takes no StopIteration
            future.set_exception(as_env_error(error))
        del job, call, future


class _Episodes:
    """Episodes in a thread or process, one after the other; async methods run on an event loop there."""

    def __init__(self, make: MakeEnv, *, seeds_globals: bool = False) -> None:
        self._make, self._seeds_globals = make, seeds_globals
        self._env: Any = None
        self._runner: asyncio.Runner | None = None

    def start(self, task: Prompt, seed: int) -> Any:
        if self._seeds_globals:  # for libraries that draw from them
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
        self._env = self._make()
        return self._run("start", task, seed)

    def step(self, action: Action) -> Any:
        return self._run("step", action)

    def close(self) -> None:
        try:
            if self._env is not None:
                self._run("close")
        finally:
            self._env = None
            if self._runner is not None:
                self._runner.close()
                self._runner = None

    def _run(self, method: str, *arguments: Any) -> Any:
        value = getattr(self._env, method)(*arguments)
        if not inspect.isawaitable(value):
            return value
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(_awaited(value))


async def _awaited(value: Any) -> Any:
    return await value


class ProcessPool:
    """At most `size` processes, each with one episode at a time."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self._make, self._left = make, size
        self._idle: list[EnvProcess] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_closed = False

    async def take(self) -> EnvProcess:
        """Wait for a free process. Start it where there is none, or it has died."""
        if self._left:
            self._left -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._free()
                raise
        try:
            while self._idle:
                if (child := self._idle.pop()).is_alive:
                    child.forget_stderr()
                    return child
                child.kill()
            return await EnvProcess.started(self._make)
        except BaseException:
            self._free()
            raise

    def give(self, child: EnvProcess) -> None:
        """Return a process to the pool, for the next episode if it is still alive."""
        if child.is_alive and not self._is_closed:
            self._idle.append(child)
        else:
            child.kill()
        self._free()

    def close(self) -> None:
        self._is_closed = True
        while self._idle:
            self._idle.pop().kill()

    def _free(self) -> None:
        """Pass the place on to the longest waiting episode."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done() and not turn.get_loop().is_closed():
                turn.set_result(None)
                return
        self._left += 1


class ProcessEnv(HostedEnv):
    """Runs in a process of a pool. It is killed when a call is cancelled, as by a deadline, and not used
    again when one fails, since a library's global state may be broken."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        self._child: EnvProcess | None = None
        self._has_failed = False

    async def ready(self, task: Prompt | None = None) -> None:  # noqa: ARG002
        if self._child is None:
            self._child = await self._pool.take()

    async def _call(self, method: str, *arguments: Any) -> Any:
        assert self._child is not None, f"{method}() of an environment that was not started"
        try:
            return await self._child.call(method, *arguments)
        except BaseException:
            self._has_failed = True
            raise

    async def _close(self) -> None:
        if (child := self._child) is None:
            return
        try:
            if child.is_alive:
                await self._call("close")
        finally:
            if self._has_failed:
                child.kill()
            self._child = None
            self._pool.give(child)
