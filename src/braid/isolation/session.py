"""Python sessions: code that runs in a sandbox, call after call with the same variables.

    python -m braid.isolation.session PARENT ISOLATION MEMORY_BYTES MAX_CHARACTERS

hosts one session at a time and watches its limits; SessionProcess is the client. Requests and replies are
lines of JSON: `{"code", "timeout_s"}` is answered by `{"output"}`, `{"ended": reason}` when the code has
ended the session, or `{"failed": reason}`; `{}` ends the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

from braid.processes import descendants, end_with, kill

from .sandbox import (
    START_LIMIT_S,
    Confined,
    Isolation,
    Limits,
    SandboxError,
    adopt_orphans,
    kill_children,
)
from .threads import start

_CPU_S = 3600.0
"""CPU time of a session."""
_MARGIN_S = START_LIMIT_S + 40.0
"""Time to start a host and a sandbox, and to end them."""


class SessionProcess:
    """A process that hosts sessions, one after the other."""

    def __init__(self, isolation: Isolation, memory_bytes: int, max_characters: int) -> None:
        """A reply's text has at most about `max_characters` characters."""
        settings = map(str, (os.getpid(), isolation, memory_bytes, max_characters))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-m", __name__, *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )

    async def run(self, code: str, timeout_s: float) -> tuple[str, str]:
        """Run code in the session, which is started by its first. Returns what it prints, and why the session
        has ended, if it has. Raises SandboxError if the sandbox fails; the process is then of no more use."""
        reply = await self._ask({"code": code, "timeout_s": timeout_s}, timeout_s + _MARGIN_S)
        if "failed" in reply:
            raise SandboxError(reply["failed"])
        return reply.get("output", ""), reply.get("ended", "")

    async def reset(self) -> None:
        """End the session."""
        await self._ask({}, _MARGIN_S)

    async def _ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(start(partial(self._answer, request)))
        except TimeoutError as error:
            self.kill()
            raise SandboxError(f"its process did not answer within {limit_s:g} s") from error
        except BaseException:
            self.kill()
            raise

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "opened with pipes"
        assert stdout is not None, "opened with pipes"
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            return json.loads(stdout.readline())
        except (OSError, ValueError) as error:
            raise SandboxError("its process has ended") from error

    def kill(self) -> None:
        """Kill the process and its session. Idempotent."""
        if self._process.returncode is None:
            started = descendants(self._process.pid)
            self._process.kill()
            kill(started)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "opened with pipes"
            with contextlib.suppress(OSError):  # of what it had not read
                pipe.close()


class _Host:
    def __init__(self, isolation: Isolation, memory_bytes: int, max_characters: int) -> None:
        self._isolation: Isolation = isolation
        self._limits = Limits(_CPU_S, memory_bytes)
        self._max_characters = max_characters
        self._session: Confined | None = None

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        if "code" not in request:
            self._end()
            return {}
        try:
            session = self._session = self._session or self._started()
        except SandboxError as error:
            self._end()
            return {"failed": str(error)}
        session.send(json.dumps({"code": request["code"]}).encode() + b"\n")
        deadline = time.monotonic() + request["timeout_s"]
        line = session.read_line(deadline, 16 * self._max_characters + 2**16)
        output = _output(line)
        if output is not None:
            return {"output": output}
        is_late = line is None and time.monotonic() >= deadline
        self._end()
        why = f"timed out after {request['timeout_s']:g} s" if is_late else "exited or exceeded its limits"
        return {"ended": why}

    def _started(self) -> Confined:
        session = Confined("session", self._isolation, self._limits)
        job = str(self._max_characters).encode()
        session.send(b"%010d" % len(job) + job)
        return session

    def _end(self) -> None:
        if self._session is not None:
            self._session.__exit__()
            self._session = None
        kill_children()


def _output(line: bytes | None) -> str | None:
    """The text of a reply; None if the code has written something else into the pipe."""
    try:
        output = json.loads(line or b"")["output"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return output if isinstance(output, str) else None


def main(parent: int, isolation: Any, memory_bytes: int, max_characters: int) -> None:
    """Serve requests until standard input ends."""
    end_with(parent)
    adopt_orphans()
    host = _Host(isolation, memory_bytes, max_characters)
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(host.reply(json.loads(line))) + "\n")
        sys.stdout.flush()
    host.reply({})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
