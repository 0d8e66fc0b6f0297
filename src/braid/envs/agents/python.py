"""The Python tool: code in a sandbox, with variables that last for the episode."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from braid.errors import EnvError
from braid.isolation.sandbox import Isolation, SandboxError
from braid.isolation.session import SessionProcess
from braid.types import Prompt

from .tools import Tool, Toolbox

SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code. Variables persist between calls. Returns what the code prints and "
        "the value of its last line if that is an expression.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code."}},
            "required": ["code"],
        },
    },
}


class PythonTool:
    """A toolbox with the tool `python`. A sandbox is started at the first call of an episode, in a process
    that earlier episodes have used."""

    def __init__(
        self, isolation: Isolation, *, memory_bytes: int, timeout_s: float, max_characters: int
    ) -> None:
        self._settings = (isolation, memory_bytes, max_characters)
        self._timeout_s = timeout_s
        self._idle: list[SessionProcess] = []
        self._end = weakref.finalize(self, _kill_all, self._idle)

    @asynccontextmanager
    async def __call__(self, task: Prompt, seed: int) -> AsyncIterator[Toolbox]:  # noqa: ARG002
        process: SessionProcess | None = None

        async def run(arguments: Mapping[str, Any]) -> str:
            nonlocal process
            process = process or (self._idle.pop() if self._idle else SessionProcess(*self._settings))
            output, ended = await process.run(arguments["code"], self._timeout_s)
            if ended:
                return f"error: the Python process {ended}; it starts anew, without earlier variables"
            return output or "(no output)"

        async def call(arguments: Mapping[str, Any]) -> str:
            try:
                return await run(arguments)
            except SandboxError as error:
                raise EnvError(f"the sandbox of the tool 'python' failed: {error}") from error

        try:
            yield Toolbox([Tool(SCHEMA, call, asyncio.Lock(), has_deadline=True)])
        finally:
            if process is not None:
                await self._returned(process)

    async def _returned(self, process: SessionProcess) -> None:
        try:
            await process.reset()
        except SandboxError:  # it has ended, as in an episode that was cancelled
            process.kill()
        else:
            self._idle.append(process)

    async def close(self) -> None:
        _kill_all(self._idle)


def _kill_all(processes: list[SessionProcess]) -> None:
    while processes:
        processes.pop().kill()
