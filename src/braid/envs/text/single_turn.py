"""The single-turn environment: one response per prompt, scored by the rewards."""

from __future__ import annotations

from braid.types import Prompt

from .base import Reply


class SingleTurn:
    """Ends after the first turn. See base.TextEnv."""

    stop_strings: tuple[str, ...] = ()

    async def start(self, prompt: Prompt) -> None:
        """Do nothing."""

    async def reply(self, text: str) -> Reply:  # noqa: ARG002  # the rewards read the answer
        return Reply(is_done=True)
