"""Python modules in child processes, and a child's end of the connection."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO

from .channel import Channel
from .system import end, end_with, handle_of, has_ended, how_it_ended, stacks_on_signal

START_LIMIT_S = 120.0
"""Time limit for a new process to import its module and to do its first job."""
_TICK_S = 0.005
"""Interval at which `end` looks whether the process has ended."""


class Child:
    """A `process` that runs a Python module, and `channel`, the connection to it. It is killed with this
    object."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        inherited: Sequence[int] = (),
        stdout: int | IO[bytes] | None = subprocess.DEVNULL,
        stderr: int | IO[bytes] | None = subprocess.DEVNULL,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start `python -m MODULE CHANNEL PARENT ARGUMENTS`, with this process's import path. It inherits the
        descriptors `inherited`; `env` is added to the environment."""
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = map(str, (theirs.fileno(), os.getpid()))
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-m", module, *numbers, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[theirs.fileno(), *inherited],
                env={**os.environ, "PYTHONPATH": path, **env},
                start_new_session=True,
            )
        self.channel = Channel(ours, handle_of(self.process.pid))
        self._end = weakref.finalize(self, _end, self.process, self.channel)

    @property
    def is_alive(self) -> bool:
        """Whether it runs and has not been killed."""
        return self._end.alive and not has_ended(self.process)

    def kill(self) -> None:
        """Kill the process and all that it has started. Idempotent."""
        self._end()

    def end(self, wait_s: float) -> str:
        """Close the connection, at which the process exits, and kill after `wait_s` what is left of it.
        Returns how it ended."""
        if self._end.alive:
            self.channel.close()
            deadline = time.monotonic() + wait_s
            while not has_ended(self.process) and time.monotonic() < deadline:
                time.sleep(_TICK_S)
            self.kill()
        return how_it_ended(self.process.poll())


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    channel.close()
    end(process)


def connect() -> tuple[Channel, list[str]]:
    """In a child: the connection to its parent, and its other arguments. From now on this process ends with
    its parent. Ctrl-C is the parent's business."""
    number, parent, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks_on_signal()
    os.set_inheritable(int(number), False)
    end_with(int(parent))
    return Channel(socket.socket(fileno=int(number))), arguments
