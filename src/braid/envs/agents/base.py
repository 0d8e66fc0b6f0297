"""The agent environment protocol. Environments see messages, never tokens: the driver (`rollout.drivers.agents`) owns
these, random numbers, length limits and retries.

A mistake of the policy, such as a malformed tool call, is answered with a message. An exception is a failure of the
environment: the episode is invalid, sampled anew, then left out of training. It is never scored 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from braid.types import Action, Message, Prompt

ToolSchema = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters": JSON schema}}."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of an episode. Without `messages` the policy reads those of its task. `tools` are shown to it by
    the chat template. `stop_strings` end a turn of the policy, in addition to those of the config."""

    messages: Sequence[Message] = ()
    tools: Sequence[ToolSchema] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's reply to a turn of the policy.

    `reward` is that of the turn. `is_done`: the episode is over. `is_truncated`: a limit of the environment ended
    it early. `metrics` are added to those of the episode. `tool_s` is the time spent in tools. `forgets`: the policy
    next reads only `messages`, without the conversation before them, in a new segment.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    is_done: bool = False
    is_truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    tool_s: float = field(default=0.0, compare=False)
    forgets: bool = False


class AgentEnv(Protocol):
    """One episode, for single use: `start`, then `step` until a step is done or truncated, then `close`.

    `close` is called whatever happens: when the episode is over, has failed or is cancelled. Each call has a
    deadline (`env.timeouts`). Methods may be plain functions, which are then called in a thread or process
    (`env.run_in`).
    """

    async def start(self, task: Prompt, seed: int) -> Opening:
        """Start an episode. Those of a group have the same task and seed, other groups other seeds."""
        ...

    async def step(self, action: Action) -> Step:
        """Reply to the policy's turn."""
        ...

    async def close(self) -> None:
        """Free what the episode holds."""
        ...
