"""The calculator as an MCP server: `mcp_calculator.py FUNCTION`, with the function of its schema as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from braid.envs.agents.calculator import calculator

FUNCTION = json.loads(sys.argv[1])


async def list_tools(context: Any, params: Any) -> ListToolsResult:
    tool = Tool(
        name=FUNCTION["name"], description=FUNCTION["description"], input_schema=FUNCTION["parameters"]
    )
    return ListToolsResult(tools=[tool])


async def call_tool(context: Any, params: Any) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=calculator(**params.arguments))])


async def main() -> None:
    server = Server("calculator", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
