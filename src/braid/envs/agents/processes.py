"""Environments in processes: an object in a child process, whose methods are called from here.

    python -m braid.envs.agents.processes CHANNEL PARENT

serves the calls of one object, one at a time. See braid.processes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import tempfile
import traceback
import weakref
from collections.abc import Callable
from typing import IO, Any

from braid.errors import EnvError
from braid.processes import START_LIMIT_S, Channel, Child, connect, end_this_process
from braid.users import as_env_error, described

_LAST_WORDS = 2000
"""Characters of stderr in the error of a process that died."""


class EnvProcess:
    """An object in a child process. One call at a time; see `started`."""

    def __init__(self) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this object
        self._child = Child(
            __name__,
            stderr=self._stderr,
            env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},  # sets have the same order in each
        )
        self._kill = weakref.finalize(self, _kill, self._child, self._stderr)

    @classmethod
    async def started(cls, make: Callable[[], object]) -> EnvProcess:
        """Start a process with the object that `make`, which must be picklable, returns there. Raises like
        `call`."""
        job, process = pickle.dumps(make), cls()
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await process._answer(job, "the start")
        except TimeoutError:
            raise EnvError(f"a process did not start within {START_LIMIT_S:g} s") from None
        except BaseException:
            process.kill()
            raise
        return process

    @property
    def is_alive(self) -> bool:
        return self._kill.alive and self._child.is_alive

    async def call(self, method: str, *arguments: object) -> Any:
        """Return what the object's method returns. A BraidError that it raises is raised here, any other
        exception as EnvError. If this is cancelled, as by a deadline, or the process ends, it is killed."""
        return await self._answer(pickle.dumps((method, arguments)), f"{method}()")

    async def _answer(self, request: bytes, what: str) -> Any:
        if not self._kill.alive:
            raise EnvError(f"{what} of a process that was killed")
        try:
            answer = await self._child.channel.ask(request)
        except (OSError, EOFError):
            how = self._child.end(0.0)
            self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_WORDS))
            words = self._stderr.read().decode(errors="replace").strip()
            how += f"; stderr ends with:\n{words}" if words else ""
            self.kill()
            raise EnvError(f"during {what} the process {how}") from None
        except BaseException:
            self.kill()
            raise
        try:
            value, error = pickle.loads(answer)
        except Exception as error:  # a value's own __reduce__ or __setstate__ may raise any
            raise EnvError(f"the value of {what} cannot be read: {described(error)}") from error
        if error is not None:
            raise error
        return value

    def forget_stderr(self) -> None:
        """Drop what the process has written to stderr, which would otherwise grow with its calls."""
        os.ftruncate(self._stderr.fileno(), 0)
        self._stderr.seek(0)  # the process shares this position

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        self._kill()


def _kill(child: Child, stderr: IO[bytes]) -> None:
    child.kill()
    stderr.close()


def main(channel: Channel) -> None:
    """Serve the calls of the parent until it closes the connection."""
    target: Any = None
    for request in channel.messages():
        value = None
        try:
            if target is None:
                target = pickle.loads(request)()
            else:
                method, arguments = pickle.loads(request)
                value = getattr(target, method)(*arguments)
            answer = pickle.dumps((value, None))
        except BaseException as error:
            traceback.print_exc()
            answer = pickle.dumps((None, as_env_error(error)))
        channel.reply(answer)
    end_this_process()


if __name__ == "__main__":
    main(connect()[0])
