"""The driver protocol."""

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
        """One group per prompt, in order. `key` separates the random numbers of this call from those of other
        calls, `numbers` those of its prompts from each other (default: their indices in `prompts`). All keys
        of a driver have the same length."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of the engine's key/value cache in this process."""
        ...

    def publish(self, version: int) -> None:
        """Use the policy's current weights from now on."""
        ...

    def sleep(self) -> None:
        """Free the device memory that the engine does not need until `wake`."""
        ...

    def wake(self) -> None:
        """Prepare for `run`."""
        ...

    def close(self) -> None: ...
