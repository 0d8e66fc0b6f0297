"""The `env` section: where episodes take place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from braid.envs.kinds import (
    ENVIRONMENTS,
    AgentEnvConfig,
    ChatEnv,
    Environment,
    GymnasiumEnv,
    LiberoEnv,
    Maker,
    ManiskillEnv,
    McpServer,
    MetaworldEnv,
    MixedEnvConfig,
    ProgramEnv,
    PythonSandbox,
    RobosuiteEnv,
    SearchTool,
    SimulatorEnv,
    SingleTurnEnv,
    TextEnv,
    Timeouts,
    ToolsEnv,
    VideoConfig,
)

if TYPE_CHECKING:
    EnvConfig = Environment
else:
    EnvConfig = Annotated[Union[tuple(ENVIRONMENTS.values())], Field(discriminator="kind")]  # noqa: UP007

__all__ = [
    "ENVIRONMENTS",
    "AgentEnvConfig",
    "ChatEnv",
    "EnvConfig",
    "Environment",
    "GymnasiumEnv",
    "LiberoEnv",
    "Maker",
    "ManiskillEnv",
    "McpServer",
    "MetaworldEnv",
    "MixedEnvConfig",
    "ProgramEnv",
    "PythonSandbox",
    "RobosuiteEnv",
    "SearchTool",
    "SimulatorEnv",
    "SingleTurnEnv",
    "TextEnv",
    "Timeouts",
    "ToolsEnv",
    "VideoConfig",
]
