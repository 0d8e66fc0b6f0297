"""The tools that a config names."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from typing import Any

from braid.envs.kinds import McpServer, SearchTool, ToolsEnv
from braid.errors import ConfigError, Problem, suggest
from braid.functions import load_function
from braid.isolation.sandbox import find_isolation

from .calculator import calculator
from .functions import class_toolbox, function_tool
from .python import PythonTool
from .search import SearchIndex
from .tools import OpenToolbox, ToolEnv, fixed

NAMES = ("calculator", "python")
"""Tools with a name of their own."""


class ToolEnvs:
    """Makes tool environments, one per episode. `close` ends what they share."""

    def __init__(self, config: ToolsEnv, base_dir: Path) -> None:
        """Paths are relative to `base_dir`, the config's folder. Raises ConfigError."""
        self._config, self._base_dir = config, base_dir
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._names: list[str] = []
        self._toolboxes = [self._toolbox(i, tool) for i, tool in enumerate(config.tools)]
        twice = [name for name, count in Counter(self._names).items() if count > 1]
        if twice:
            problem = f"two tools are named {twice[0]!r}; rename one of them"
            raise ConfigError([Problem("env.tools", problem, "config")])

    def __call__(self) -> ToolEnv:
        config = self._config
        return ToolEnv(
            self._toolboxes,
            timeout_s=config.tool_timeout_s,
            max_result_characters=config.max_result_characters,
        )

    async def close(self) -> None:
        for close in self._closers:
            await close()

    def _toolbox(self, index: int, tool: str | McpServer | SearchTool) -> OpenToolbox:
        key = f"env.tools[{index}]"
        if isinstance(tool, McpServer):
            return self._mcp(tool, key)
        if isinstance(tool, SearchTool):
            _require("bm25s", key)
            return self._function(self._index(tool, key).search, key)
        if tool == "python":
            return self._python()
        if tool == "calculator":
            function = calculator
        elif "." not in tool and ":" not in tool:
            problem = (
                f"unknown tool {tool!r}{suggest(tool, NAMES)}; allowed are {', '.join(NAMES)}, a function "
                "or class (package.module.name or file.py:name), an MCP server ({command: ...} or {url: "
                "...}), and a search index ({index: documents.jsonl})"
            )
            raise ConfigError([Problem(key, problem, "config")])
        else:
            function = load_function(tool, base_dir=self._base_dir, key=key, allows_class=True)
        if isinstance(function, type):
            schemas, toolbox = class_toolbox(function, key=key)
            self._names += [schema["function"]["name"] for schema in schemas]
            return toolbox
        return self._function(function, key)

    def _function(self, function: Callable[..., Any], key: str) -> OpenToolbox:
        tool = function_tool(function, key=key)
        self._names.append(tool.name)
        return fixed([tool])

    def _index(self, tool: SearchTool, key: str) -> SearchIndex:
        path = self._base_dir / Path(tool.index).expanduser()
        if not isfile(path):
            near = suggest(path.name, [p.name for p in path.parent.glob("*.jsonl")])
            raise ConfigError([Problem(f"{key}.index", f"no such file: {path}{near}", "config")])
        return SearchIndex.read(path)

    def _mcp(self, server: McpServer, key: str) -> OpenToolbox:
        _require("mcp", key)
        from .mcp import McpTools, search_path

        command = server.command
        if command is not None:
            path = self._base_dir / command if os.sep in command else command
            if shutil.which(path, path=search_path()) is None:
                raise ConfigError([Problem(f"{key}.command", f"no such program: {command!r}", "config")])
        tools = McpTools(server, self._base_dir, timeout_s=self._config.tool_timeout_s)
        self._closers.append(tools.close)
        return tools

    def _python(self) -> OpenToolbox:
        config = self._config
        tool = PythonTool(
            find_isolation(config.python.isolation, "env.python.isolation"),
            memory_bytes=config.python.memory_bytes,
            timeout_s=config.tool_timeout_s,
            max_characters=config.max_result_characters,
        )
        self._names.append("python")
        self._closers.append(tool.close)
        return tool


def _require(package: str, key: str) -> None:
    if find_spec(package) is None:
        problem = f"needs the package {package}, which is not installed: pip install 'braid-rl[agents]'"
        raise ConfigError([Problem(key, problem, "config")])
