"""An environment that does what the policy says, for tests of hosts; processes import it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

from braid.envs.agents.base import Opening, Step
from braid.errors import ConfigError
from braid.types import Action, Prompt

RELEASED = threading.Event()
"""Ends "hang" in this process."""


class Scripted:
    def __init__(self, word: str = "", *, refuses: bool = False) -> None:
        if refuses:
            raise ConfigError("refused")
        self._word, self._num, self.is_closed = word, 0, False

    def start(self, task: Prompt, seed: int) -> Opening:
        self._random = random.Random(seed)
        return Opening([_said(f"{task.fields.get('topic')} {self._word} {self._random.random()}")])

    def step(self, action: Action) -> Step:
        self._num += 1
        reply = getattr(self, f"_{action.text.split()[0]}")() if action.text else ""
        return Step([_said(f"{self._num} {reply}")], self._random.random(), is_done=action.text == "end")

    def close(self) -> None:
        self.is_closed = True
        if self._word == "bad close":
            raise ValueError("cannot close")

    def _end(self) -> str:
        return ""

    def _draw(self) -> str:
        return str(random.random())

    def _set(self) -> str:
        return ",".join({"red", "green", "blue", "black", "white"})

    def _pid(self) -> str:
        return str(os.getpid())

    def _spawn(self) -> str:
        return str(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)

    def _modules(self) -> str:
        return " ".join(name for name in ("torch", "transformers", "ray") if name in sys.modules)

    def _print(self) -> str:
        sys.stdout.write("noise")
        return ""

    def _hang(self) -> str:
        RELEASED.wait()
        return "released"

    def _die(self) -> str:
        sys.stderr.write("out of luck")
        os._exit(7)

    def _segfault(self) -> str:
        os.kill(os.getpid(), 11)
        return ""

    def _raise(self) -> str:
        raise ValueError("no such thing")

    def _stop(self) -> str:
        return next(iter(()))

    def _exit(self) -> str:
        sys.exit("leaving")


class AsyncScripted(Scripted):
    async def start(self, task: Prompt, seed: int) -> Opening:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().start(task, seed)

    async def step(self, action: Action) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().step(action)

    async def close(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().close()


class Wrong(Scripted):
    def step(self, action: Action) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "text"


def _said(text: str):
    return {"role": "user", "content": text}
