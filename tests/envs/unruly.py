"""An environment that misbehaves in the way that the action names. Its observation counts its steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

GO_ON, HANG, EXIT, CRASH, SPAWN, RAISE, INTERRUPT = range(7)


class Unruly(gymnasium.Env):
    """Six steps an episode. The first reset of all copies removes the file `first`, and does `act`. Each
    `close` adds a line to the file `closed`, or hangs without one if `act` says so."""

    observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(7)

    def __init__(self, act: int = GO_ON, first: str = "", closed: str = "") -> None:
        self._act, self._first, self._closed = act, first, closed
        self._count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self._first:
            with suppress(FileNotFoundError):
                Path(self._first).unlink()
                self._do(self._act)
        self._count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self._count += 1
        reward = self._do(action)
        return np.full(1, self._count, np.float32), reward, self._count == 6, False, {}

    def close(self) -> None:
        if self._closed:
            with Path(self._closed).open("a") as file:
                file.write("closed\n")
        elif not self._first:
            self._do(self._act)

    def _do(self, action: int) -> float:
        acts: dict[int, Callable[[], Any]] = {
            HANG: threading.Event().wait,
            EXIT: lambda: os._exit(3),
            CRASH: lambda: os.kill(os.getpid(), signal.SIGSEGV),
            SPAWN: lambda: subprocess.Popen(["sleep", "1000"]).pid,
            RAISE: _loaded,
            INTERRUPT: lambda: os.kill(os.getppid(), signal.SIGINT),
        }
        return float(acts[action]() or 0) if action in acts else 1.0


def _loaded() -> None:
    raise RuntimeError(f"torch is loaded: {'torch' in sys.modules}")


gymnasium.register("Unruly-v0", Unruly)
