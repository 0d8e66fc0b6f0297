"""An MCP server for tests: `mcp_server.py [PORT]`, over standard streams or HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp_types import INVALID_PARAMS

server = MCPServer("demo server")
count = 0
barrier = asyncio.Barrier(2)


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    raise ValueError("no such page")


@server.tool()
def refuse() -> str:
    raise MCPError(INVALID_PARAMS, "page is not a page")


@server.tool()
async def meet() -> str:
    await barrier.wait()
    return "met"


@server.tool()
def increase() -> int:
    global count  # noqa: PLW0603
    count += 1
    return count


@server.tool()
async def hang() -> str:
    await asyncio.Event().wait()
    return ""


@server.tool()
def picture() -> Image:
    return Image(data=b"x", format="png")


@server.tool()
def process() -> str:
    return str(os.getpid())


@server.tool()
def die() -> str:
    print("last words", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
