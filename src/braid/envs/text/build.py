"""Building text environments from the config's environment section."""

from __future__ import annotations

from collections.abc import Callable

from braid.config.rollout import SingleTurnEnv, ToolEnv
from braid.envs.agents import calculator

from .base import TextEnv
from .single_turn import SingleTurn
from .tools import Tool, ToolConversation


async def _calculator(text: str) -> str:
    return calculator.calculator(text)


TOOLS: dict[str, tuple[str, Tool]] = {"calculator": ("calc", _calculator)}
"""Name in the config -> (tag written by the policy, tool)."""


def text_env_maker(config: SingleTurnEnv | ToolEnv) -> Callable[[], TextEnv]:
    """Return a factory of environments, to be called once per trajectory."""
    if isinstance(config, SingleTurnEnv):
        return SingleTurn
    tools = dict(TOOLS[name] for name in config.tools)
    return lambda: ToolConversation(tools, max_turns=config.max_turns, timeout_s=config.tool_timeout_s)
