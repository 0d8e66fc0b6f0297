"""The `env` section: where episodes take place, one file a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from .agent import AgentEnvConfig, MixedEnvConfig
from .base import Environment
from .gymnasium import GymnasiumEnv
from .libero import LiberoEnv
from .maniskill import ManiskillEnv
from .metaworld import MetaworldEnv
from .program import ProgramEnv
from .robosuite import RobosuiteEnv
from .simulator import Maker, SimulatorEnv, VideoConfig
from .single_turn import SingleTurnEnv
from .text import ChatEnv, TextEnv, Timeouts
from .tools import McpServer, PythonSandbox, SearchTool, ToolsEnv

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

ENVIRONMENTS: Mapping[str, type[Environment]] = {
    "single_turn": SingleTurnEnv,
    "tools": ToolsEnv,
    "agent": AgentEnvConfig,
    "program": ProgramEnv,
    "gymnasium": GymnasiumEnv,
    "metaworld": MetaworldEnv,
    "maniskill": ManiskillEnv,
    "libero": LiberoEnv,
    "robosuite": RobosuiteEnv,
}
"""The kinds of `env`."""
if TYPE_CHECKING:
    EnvConfig = Environment
else:
    EnvConfig = Annotated[Union[tuple(ENVIRONMENTS.values())], Field(discriminator="kind")]  # noqa: UP007
