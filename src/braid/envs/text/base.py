"""The text environment protocol. Environments see messages, never tokens: the driver (`rollout.drivers.text`) owns
these, random numbers, length limits and retries. Any exception makes the trajectory invalid, so mistakes of the
policy must be answered with text instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from braid.types import Prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """The environment's reply to a turn of the policy.

    `text` is appended verbatim after the turn as context; `reward` is that of the turn. `is_done`: the conversation is
    over. `is_truncated`: a limit of the environment ended it early. `tool_s` is the time spent in tools.
    """

    text: str = ""
    reward: float = 0.0
    is_done: bool = False
    is_truncated: bool = False
    tool_s: float = field(default=0.0, compare=False)


class TextEnv(Protocol):
    """One conversation, for single use: `start`, then `reply` until a reply is done or truncated.

    An environment may have an `async def close(self) -> None`. It is called when the conversation is over, has
    failed or is cancelled. All calls have a deadline (`rollout.env_timeout_s`)."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a turn of the policy, in addition to those of the config."""
        ...

    async def start(self, prompt: Prompt) -> None:
        """Start the task. The policy already has the prompt's tokens."""
        ...

    async def reply(self, text: str) -> Reply:
        """Reply to the policy's turn; `text` is the decoded turn, without its end token."""
        ...
