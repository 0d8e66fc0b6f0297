"""The driver protocol."""

from __future__ import annotations

from typing import Protocol

from braid.types import Group, Prompt


class Driver(Protocol):
    """Turns prompts into groups of trajectories: an engine with a text environment, or a simulator."""

    async def group(self, prompt: Prompt, group_size: int, key: tuple[int, ...]) -> Group:
        """Sample a group. Its random numbers depend only on `key`; all keys of a driver have the same length.
        Failures of environments and of the engine (EngineError) become statuses. Cancelling the task that
        awaits this ends the trajectories and closes their environments."""
        ...
