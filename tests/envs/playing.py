"""Plays episodes of tool environments without a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from braid.envs.agents.base import AgentEnv, Opening, Step
from braid.types import Action, Prompt, ToolCall

TASK = Prompt("test:0", "test", (1,), ({"role": "user", "content": "2*3="},), {"answer": "6"})


def call(name: str, id: str = "call_0", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, id)


async def play(
    env: AgentEnv, *turns: Sequence[ToolCall], task: Prompt = TASK, seed: int = 0
) -> tuple[Opening, list[Step]]:
    """The opening, and the replies to turns with these calls."""
    try:
        opening = await env.start(task, seed)
        return opening, [await env.step(Action("", tool_calls=tuple(calls))) for calls in turns]
    finally:
        await env.close()


def played(env: AgentEnv, *turns: Sequence[ToolCall], task: Prompt = TASK, seed: int = 0) -> list[Step]:
    return asyncio.run(play(env, *turns, task=task, seed=seed))[1]


def said(env: AgentEnv, *calls: ToolCall) -> list[str]:
    """The results of calls in one turn."""
    (step,) = played(env, calls)
    return [message["content"] for message in step.messages]
