"""The protocol of a text environment: a conversation partner that sees messages, never tokens.

An environment lives for one trajectory. The driver (`rollout.drivers.text`) owns tokens, random numbers, limits of length
and retries; the environment owns what is said back, what it is worth, and when the conversation is over. Whatever it
raises makes the trajectory invalid: a mistake of the policy is answered with text instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from braid.types import Prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment answers to a turn of the policy.

    `text` is put after the turn as context, exactly as it is; `reward` is for the turn answered. `is_done`: the
    conversation is over. `is_truncated`: it was cut by a limit of the environment before its end.
    """

    text: str = ""
    reward: float = 0.0
    is_done: bool = False
    is_truncated: bool = False


class TextEnv(Protocol):
    """One conversation. Use once: `start`, then `reply` until a reply is done or truncated."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a turn of the policy, beside those of the config."""
        ...

    async def start(self, prompt: Prompt) -> None:
        """Take the task in. The policy has the prompt's tokens already."""
        ...

    async def reply(self, text: str) -> Reply:
        """Answer the policy's turn; `text` is the turn decoded, without its end token."""
        ...
