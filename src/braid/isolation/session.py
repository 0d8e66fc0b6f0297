"""Python sessions: code that runs in a sandbox, call after call with the same variables.

    python -m braid.isolation.session CHANNEL PARENT ISOLATION MEMORY_BYTES MAX_CHARACTERS

hosts one session at a time and watches its limits; SessionProcess is the client (braid.processes). Requests
and replies are JSON: `{"code", "timeout_s"}` is answered by `{"output"}`, `{"ended": reason}` when the code
has ended the session, or `{"failed": reason}`; `{}` ends the session.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

from braid.processes import Channel, Child, connect, end_this_process

from .sandbox import (
    MAX_WAIT,
    START_LIMIT_S,
    Confined,
    Deadline,
    Isolation,
    Limits,
    SandboxError,
    adopt_orphans,
    kill_children,
)
from .threads import start

_CPU_S = 3600.0
"""CPU time of a session."""
_MARGIN_S = MAX_WAIT * START_LIMIT_S + 40.0
"""Time to start a host and a sandbox, and to end them."""


class SessionProcess:
    """A process that hosts sessions, one after the other."""

    def __init__(self, isolation: Isolation, memory_bytes: int, max_characters: int) -> None:
        """A reply's text has at most about `max_characters` characters."""
        settings = (isolation, str(memory_bytes), str(max_characters))
        self._child = Child(__name__, *settings, env={"PYTHONDONTWRITEBYTECODE": "1"})

    async def run(self, code: str, timeout_s: float) -> tuple[str, str]:
        """Run code in the session, which is started by its first. Returns what it prints, and why the session
        has ended, if it has. Raises SandboxError if the sandbox fails; the process is then of no more use."""
        reply = await self._ask({"code": code, "timeout_s": timeout_s}, MAX_WAIT * timeout_s + _MARGIN_S)
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
        try:
            self._child.channel.send(json.dumps(request).encode())
            return json.loads(self._child.channel.receive())
        except (OSError, EOFError, ValueError) as error:
            raise SandboxError("its process has ended") from error

    def kill(self) -> None:
        """Kill the process and its session. Idempotent."""
        self._child.kill()


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
            session.send(json.dumps({"code": request["code"]}).encode() + b"\n")
            deadline = Deadline(request["timeout_s"])
            line = session.read_line(deadline, 16 * self._max_characters + 2**16)
        except SandboxError as error:
            self._end()
            return {"failed": str(error)}
        output = _output(line)
        if output is not None:
            return {"output": output}
        is_late = line is None and time.monotonic() >= deadline.time_s
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


def main(channel: Channel, isolation: Any, memory_bytes: int, max_characters: int) -> None:
    """Serve requests until the other end closes the connection."""
    adopt_orphans()
    host = _Host(isolation, memory_bytes, max_characters)
    for request in channel.messages():
        channel.reply(json.dumps(host.reply(json.loads(request))).encode())
    host.reply({})
    end_this_process()


if __name__ == "__main__":
    its_channel, (kind, most_bytes, most_characters) = connect()
    main(its_channel, kind, int(most_bytes), int(most_characters))
