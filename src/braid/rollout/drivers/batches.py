"""A driver that limits how many prompts run at a time."""

from __future__ import annotations

from collections.abc import Sequence

from braid.types import Group, Prompt

from .base import Driver


class Batches:
    """Passes `size` prompts at a time to `driver`. Results do not depend on `size`: each prompt keeps its
    random numbers."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver = driver
        self._size = size

    async def run(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        key: tuple[int, ...],
        numbers: Sequence[int] | None = None,
    ) -> list[Group]:
        """See Driver."""
        places = range(len(prompts)) if numbers is None else numbers
        groups: list[Group] = []
        for start in range(0, len(prompts), self._size):
            part = slice(start, start + self._size)
            groups += await self._driver.run(prompts[part], group_size, key=key, numbers=places[part])
        return groups

    @property
    def cache_bytes(self) -> int:
        """See Driver."""
        return self._driver.cache_bytes

    def publish(self, version: int) -> None:
        self._driver.publish(version)

    def sleep(self) -> None:
        """See Driver."""
        self._driver.sleep()

    def wake(self) -> None:
        """See Driver."""
        self._driver.wake()

    def close(self) -> None:
        self._driver.close()
