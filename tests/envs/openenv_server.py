"""An OpenEnv server: `python -m tests.envs.openenv_server CAPACITY`. Prints its port."""

from __future__ import annotations

import random
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Answer(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, highest: int = 9, **kwargs: Any
    ) -> Answer:
        self._secret = random.Random(seed).randint(1, highest)
        return Answer(text=f"1 to {highest}")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Answer:
        if action.guess == 99:
            raise RuntimeError("the environment broke")
        is_hit = action.guess == self._secret
        text = "yes" if is_hit else "higher" if action.guess < self._secret else "lower"
        return Answer(text=text, done=is_hit, reward=float(is_hit))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(GuessEnvironment, Guess, Answer, max_concurrent_envs=int(sys.argv[1]))
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
