"""Kinds of environments, one file each. They import nothing heavy: the config is made of them."""

from collections.abc import Mapping

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
