"""MCP servers as providers of tools, over the standard streams of a command or streamable HTTP.

Arguments are validated before a call, so an error result is the tool's own: by default the policy reads it,
since many servers report wrong values so. A time-out or a dead server is a failure of the environment; the
next episode gets a new connection.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, REQUEST_TIMEOUT

from braid.envs.kinds import McpServer
from braid.errors import EnvError, ToolError
from braid.processes import guarded
from braid.types import Prompt

from .tools import Tool, Toolbox

START_LIMIT_S = 60.0
"""Time limit for starting or reaching a server, until it has listed its tools."""
_LOG_BYTES = 1 << 20
"""The log of a server is emptied when it is longer."""


def search_path() -> str:
    """Where the command of a server is looked up: first beside this Python."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


class McpTools:
    """The toolbox of a server. Episodes share a connection, or have one each (`per_episode`)."""

    def __init__(self, server: McpServer, base_dir: Path, *, timeout_s: float) -> None:
        self._server, self._base_dir, self._timeout_s = server, base_dir, timeout_s
        self._shared: _Session | None = None

    @asynccontextmanager
    async def __call__(self, task: Prompt, seed: int) -> AsyncIterator[Toolbox]:  # noqa: ARG002
        session = self._session()
        session.num_users += 1
        try:
            opened = await session.opened()
            tools = [
                Tool(schema, partial(self._call, session, opened.client, name), has_deadline=True)
                for name, schema in opened.schemas.items()
            ]
            yield Toolbox(tools, prefix=re.sub(r"\W", "_", self._server.name or opened.name))
        finally:
            session.num_users -= 1
            session.trim_log()
            if not session.num_users and (self._server.per_episode or not session.is_usable):
                await session.close()

    async def close(self) -> None:
        """Close the shared connection."""
        if self._shared is not None:
            await self._shared.close()

    def _session(self) -> _Session:
        if self._server.per_episode:
            return _Session(self._server, self._base_dir)
        shared = self._shared
        if shared is None or not shared.is_usable or shared.loop is not asyncio.get_running_loop():
            shared = self._shared = _Session(self._server, self._base_dir)
        return shared

    async def _call(
        self, session: _Session, client: Client, name: str, arguments: Mapping[str, Any]
    ) -> object:
        where = f"tool {name!r} of the MCP server {session.name!r}"
        try:
            result = await client.call_tool(name, dict(arguments), read_timeout_seconds=self._timeout_s)
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                raise ToolError(f"error: {error.message}") from None
            session.is_usable = False
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, MCPError):
                is_late, is_closed = error.code == REQUEST_TIMEOUT, error.code == CONNECTION_CLOSED
                why = f"timed out after {self._timeout_s:g} s" if is_late else error.message
                why += session.last_lines() if is_closed else ""
            raise EnvError(f"{where}: {why}") from error
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        if result.is_error and self._server.error_is_failure:
            raise EnvError(f"{where} failed: {text}")
        if result.is_error:
            raise ToolError(text)
        return text if result.content else result.structured_content


@dataclass(frozen=True, slots=True)
class _Opened:
    client: Client
    name: str
    schemas: Mapping[str, Mapping[str, Any]]


class _Session:
    """A connection to a server. It is entered and left in a task of its own, as anyio's cancel scopes have to
    be."""

    def __init__(self, server: McpServer, base_dir: Path) -> None:
        self._server, self._base_dir = server, base_dir
        self.name = server.name or server.url or str(server.command)
        self.is_usable, self.num_users = True, 0
        self.loop = asyncio.get_running_loop()
        self._log: TextIO | None = None
        self._is_over = asyncio.Event()
        self._opened: asyncio.Future[_Opened] = self.loop.create_future()
        self._task = asyncio.create_task(self._serve(), name=f"MCP server {self.name}")

    async def opened(self) -> _Opened:
        """Wait until the server is ready. Raises EnvError if it does not start."""
        return await asyncio.shield(self._opened)

    async def close(self) -> None:
        """Close the connection, and end the server that was started for it."""
        self._is_over.set()
        await asyncio.wait({self._task})

    def last_lines(self) -> str:
        """The end of the server's log, for an error message."""
        if self._log is None or self._log.closed:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2000))
        lines = self._log.read().strip().splitlines()[-5:]
        return "; last log lines:\n" + "\n".join(lines) if lines else ""

    def trim_log(self) -> None:
        """Empty the server's log if it is long."""
        if (
            self._log is not None
            and not self._log.closed
            and os.fstat(self._log.fileno()).st_size > _LOG_BYTES
        ):
            os.ftruncate(self._log.fileno(), 0)

    async def _serve(self) -> None:
        # Appending: the server, which has the same descriptor, writes at the end wherever this process reads.
        with tempfile.TemporaryFile("a+", errors="replace") as log:
            self._log = cast("TextIO", log)
            await self._connected(self._log)

    async def _connected(self, log: TextIO) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(START_LIMIT_S):
                    client = await stack.enter_async_context(Client(self._transport(log)))
                    schemas = await _schemas(client)
                info = client.server_info
                self._opened.set_result(_Opened(client, info.name if info else "mcp", schemas))
                await self._is_over.wait()
        except (Exception, asyncio.CancelledError) as error:
            is_late = isinstance(error, TimeoutError)
            why = f"no answer within {START_LIMIT_S:g} s" if is_late else _cause(error)
            if not self._opened.done():
                problem = f"the MCP server {self.name!r} did not start: {why}{self.last_lines()}"
                self._opened.set_exception(EnvError(problem))
                self._opened.exception()  # nobody may be waiting any more
        finally:
            self.is_usable = False

    def _transport(self, log: TextIO) -> Any:
        server = self._server
        if server.url is not None:
            return server.url
        assert server.command is not None, "checked by the config"
        command, *args = guarded([server.command, *server.args])
        parameters = StdioServerParameters(
            command=command, args=args, env={"PATH": search_path(), **server.env}, cwd=self._base_dir
        )
        return stdio_client(parameters, errlog=log)


async def _schemas(client: Client) -> dict[str, Mapping[str, Any]]:
    """The schemas of all tools, by name."""
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    functions = [
        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        for tool in tools
    ]
    return {function["name"]: {"type": "function", "function": function} for function in functions}


def _cause(error: BaseException) -> str:
    """The first exception in a group of task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
