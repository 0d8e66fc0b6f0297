"""What the loops ask of a driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from braid.types import Group, Prompt


class Driver(Protocol):
    """Turns prompts into groups of trajectories: an engine with a text environment, or a simulator."""

    async def run(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        key: tuple[int, ...],
        numbers: Sequence[int] | None = None,
    ) -> list[Group]:
        """One group per prompt, in order. `key` tells the random numbers of this call from those of others, `numbers` those of
        its prompts from each other: their places in `prompts` when None. Keys of one driver have one length."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Memory of the engine's key/value cache in this process."""
        ...

    def publish(self, version: int) -> None:
        """Take the policy's weights as they are now."""
        ...

    def sleep(self) -> None:
        """Give back what the engine can spare of its device until `wake`."""
        ...

    def wake(self) -> None:
        """Be ready to run again."""
        ...

    def close(self) -> None: ...
