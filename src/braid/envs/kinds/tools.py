"""Conversations in which the policy calls tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag, model_validator

from braid.sections import Section, Unused

from .text import Close, SteppedEnv

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.envs.agents.base import AgentEnv
    from braid.plan.plan import Plan


class McpServer(Section):
    """Tools of an MCP server: a command that speaks MCP over its standard streams, or the URL of a running
    server (streamable HTTP)."""

    kind: Literal["mcp"] = "mcp"
    """Tools of an MCP server."""
    name: str = ""
    """Prefix of tool names that occur more than once; the server's own name when empty."""
    command: str | None = None
    """Program to start, in the config's folder."""
    args: tuple[str, ...] = ()
    """Arguments of the command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, in addition to PATH, HOME and the like."""
    url: str | None = None
    """URL of a running server."""
    per_episode: bool = False
    """Start or connect to the server for each episode, for servers with state; false: once per rollout
    worker."""
    error_is_failure: bool = False
    """Treat an error result of a tool as a failure of the environment; false: the policy reads it."""

    @model_validator(mode="after")
    def _one_of_both(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("set either `command` or `url` of an MCP server")
        return self


class SearchTool(Section):
    """A search tool over documents, ranked by BM25 (extra `agents`)."""

    kind: Literal["search"] = "search"
    """Search over documents."""
    index: str
    """JSON lines file of the documents, each with `id`, `title` and `text`."""


def _tool_kind(value: Any) -> str:
    if isinstance(value, dict):
        return value.get("kind", "search" if "index" in value else "mcp")
    return getattr(value, "kind", "name")


ToolSource = Annotated[
    Annotated[str, Tag("name")] | Annotated[McpServer, Tag("mcp")] | Annotated[SearchTool, Tag("search")],
    Discriminator(_tool_kind),
]


class PythonSandbox(Section):
    """Sandbox of the tool `python`."""

    isolation: Literal["auto", "bubblewrap", "sandlock", "process"] = "auto"
    """Sandbox: bubblewrap, sandlock, or with auto the first of them that works on this machine. process: only
    limits on time, memory and files; the program can read files, use the network and kill processes."""
    memory_bytes: int = Field(default=2**30, ge=2**26, le=2**32)
    """Address space limit of an episode's Python process, in bytes."""


class ToolsEnv(SteppedEnv):
    """A conversation in which the policy may call tools, by the tool calls of its chat template."""

    kind: Literal["tools"]
    """Multiple turns with tool calls."""
    tools: tuple[ToolSource, ...] = ("calculator",)
    """Available tools: `calculator`, `python`, a function or class (package.module.name or file.py:name), an
    MCP server ({command, args, env} or {url}), or a search index ({index})."""
    tool_timeout_s: PositiveFloat = 30.0
    """Timeout of one tool call, in seconds."""
    max_result_characters: PositiveInt = 10_000
    """Maximum length of a tool's result, which is cut after it."""
    python: PythonSandbox = PythonSandbox()
    """Sandbox of the tool `python`."""

    @property
    def uses_tools(self) -> bool:
        return True

    def environments(self, base_dir: Path) -> tuple[Callable[[], AgentEnv], Close]:
        from braid.envs.agents.toolboxes import ToolEnvs

        tools = ToolEnvs(self, base_dir)
        return tools, tools.close

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if "python" not in self.tools:
            yield "env.tools does not contain the tool `python`", "env.python"
        yield from super().unused(config, plan)
