"""Runs a user's program for one episode: a Python function in a thread, or a command line in a process."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from braid.errors import EnvError
from braid.isolation import threads
from braid.processes import guarded, kill, kill_group, with_variable
from braid.types import Prompt

Program = Callable[[Prompt, str, str, int], Awaitable[object]]
"""Plays an episode of a task, given the base URL, the API key and a seed; returns the reward, rewards by
name, or None. Ends soon after it is cancelled."""

_SHOWN_LINES, _SHOWN_BYTES = 5, 4096
_KILL_S = 10.0


async def run_function(
    function: Callable[..., Any], task: Prompt, base_url: str, api_key: str, seed: int
) -> object:
    """Call `function(task, base_url, api_key)`, with `seed=` if it has this parameter or `**kwargs`, in a
    thread; a coroutine runs on an event loop of its own, so that one that blocks delays no other. A cancelled
    function keeps its thread until it returns; a cancelled coroutine is cancelled."""
    parameters = inspect.signature(function).parameters
    takes_seed = "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options = {"seed": seed} if takes_seed else {}
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def awaited(result: Coroutine[Any, Any, object]) -> object:
        task = asyncio.current_task()
        assert task is not None, "asyncio.run has made one"
        running.append((asyncio.get_running_loop(), task))
        return await result

    def call() -> object:
        result = function(task, base_url, api_key, **options)
        return asyncio.run(awaited(result)) if inspect.iscoroutine(result) else result

    future = threads.start(call)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if running and not future.done():
            loop, task_of_program = running[0]
            loop.call_soon_threadsafe(task_of_program.cancel)
        raise


def described(task: Prompt) -> str:
    """The task as JSON, for programs in other processes."""
    fields = {"uid": task.uid, "source": task.source, "fields": dict(task.fields), "messages": task.messages}
    return json.dumps(fields, default=str)


async def run_command(
    argv: Sequence[str], folder: Path, task: Prompt, base_url: str, api_key: str, seed: int
) -> None:
    """Run a command in `folder`. Raises EnvError with the last lines of its error output if it fails.
    Whatever happens, it and the processes that it started are killed in the end."""
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "BRAID_TASK": described(task),
        "BRAID_SEED": str(seed),
    }
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *guarded(argv),
            cwd=folder,
            env={**os.environ, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = await process.wait()
        finally:
            await asyncio.wrap_future(threads.start(lambda: _kill_all(process.pid, api_key)))
            await process.wait()
        if code:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            lines = errors.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
            raise EnvError("\n".join([f"{argv[0]} ended with exit code {code}", *lines]))


def _kill_all(group: int, api_key: str) -> None:
    """Kill the processes of a command: its process group, and those that have left it but have its key."""
    kill_group(group)
    deadline = time.monotonic() + _KILL_S
    while (left := with_variable("OPENAI_API_KEY", api_key)) and time.monotonic() < deadline:
        kill(left)
        time.sleep(0.01)
