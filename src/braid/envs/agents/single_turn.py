"""The single-turn environment: one response per prompt, scored by the rewards."""

from __future__ import annotations

from braid.types import Action, Prompt

from .base import Opening, Step


class SingleTurn:
    """Ends after the first turn. See base.AgentEnv."""

    async def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        return Opening()

    async def step(self, action: Action) -> Step:  # noqa: ARG002  # the rewards read the answer
        return Step(is_done=True)

    async def close(self) -> None:
        """Do nothing."""
