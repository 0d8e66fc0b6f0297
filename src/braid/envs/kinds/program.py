"""Programs that play episodes by calling the policy as a server."""

from __future__ import annotations

import os
import shutil
from functools import partial
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from braid.errors import ConfigError, Problem
from braid.functions import load_function

from .text import ChatEnv, NewDriver

if TYPE_CHECKING:
    from braid.models.chat import ChatFormat
    from braid.rollout.drivers.base import Driver
    from braid.rollout.engine import RolloutEngine, Sampling
    from braid.rollout.sessions.programs import Program


class ProgramEnv(ChatEnv):
    """A program that plays an episode by calling the policy as an OpenAI-compatible server."""

    kind: Literal["program"]
    """A program that calls the policy."""
    program: str | tuple[str, ...] = Field(min_length=1)
    """Python function `(task, base_url, api_key) -> reward` (package.module.function or file.py:function), or
    a command line as a list, which reads OPENAI_BASE_URL, OPENAI_API_KEY, BRAID_TASK and BRAID_SEED; or
    external: programs that run elsewhere and ask for episodes, with the key in BRAID_EXTERNAL_KEY."""
    max_turns: PositiveInt = 50
    """Maximum calls of an episode, after which they are refused and the trajectory is truncated."""
    episode_timeout_s: PositiveFloat = 600.0
    """Time limit of an episode, in seconds; a program that takes longer is stopped and has failed."""
    concurrency: PositiveInt = 64
    """Maximum number of programs that run at a time, per rollout worker."""
    host: str = "127.0.0.1"
    """Address on which the server listens, and by which programs call it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the server; 0 for any free one."""

    gives_rewards: ClassVar[bool] = True

    @property
    def external_key(self) -> str | None:
        """The key of programs that are not started here; None if they are. Raises ConfigError without a good
        one."""
        if self.program != "external":
            return None
        name = "BRAID_EXTERNAL_KEY"
        if len(key := os.environ.get(name, "")) < 16:
            why = (
                "external programs need a secret of at least 16 characters in the environment variable "
                f"{name}"
            )
            raise _problem("env.program", f"{why}; set it for the run and for the programs")
        if self.port == 0:
            raise _problem("env.port", "external programs have to know the port; set it, for example to 8123")
        return key

    def started(self, base_dir: Path) -> Program:
        """The program that is started for an episode. Raises ConfigError if it does not exist."""
        from braid.rollout.sessions.programs import run_command, run_function

        if isinstance(self.program, str):
            return partial(run_function, load_function(self.program, base_dir=base_dir, key="env.program"))
        name = self.program[0]
        if shutil.which(name) is None and not isfile(base_dir / name):
            why = f"no such command: {name!r}; install it, or write its path, relative to {base_dir}"
            raise _problem("env.program", why)
        return partial(run_command, self.program, base_dir)

    def check(self, base_dir: Path) -> None:
        if self.external_key is None:
            self.started(base_dir)

    def drivers(self, base_dir: Path, *, needs_reward: bool) -> tuple[NewDriver, None]:
        from braid.rollout.drivers.programs import ProgramDriver
        from braid.rollout.sessions.server import SessionServer

        key = self.external_key
        server = SessionServer(self.host, self.port, max_episodes=self.concurrency, external_key=key)
        program = self.started(base_dir) if key is None else server.offer

        def new_driver(
            engine: RolloutEngine,
            chat: ChatFormat,
            sampling: Sampling,
            context: int,
            *,
            seed: int,
            retries: int,
            opponent: RolloutEngine | None = None,
        ) -> Driver:
            assert opponent is None, "programs have no opponents"
            return ProgramDriver(
                server,
                program,
                engine,
                chat,
                sampling,
                seed=seed,
                retries=retries,
                max_context_tokens=context,
                max_turns=self.max_turns,
                timeout_s=self.episode_timeout_s,
                needs_reward=needs_reward,
            )

        return new_driver, None


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(key, message, "config")])
