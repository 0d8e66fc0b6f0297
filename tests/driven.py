"""Groups that a driver samples side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from braid.cluster.loops import task_group
from braid.rollout.drivers.base import Driver
from braid.types import Group, Prompt


async def groups_of(
    driver: Driver, prompts: Sequence[Prompt], group_size: int = 1, key: tuple[int, ...] = (0, 0)
) -> list[Group]:
    async with task_group() as tasks:
        groups = [
            tasks.create_task(driver.group(prompt, group_size, (*key, i))) for i, prompt in enumerate(prompts)
        ]
    return [group.result() for group in groups]


def drive(
    driver: Driver, prompts: Sequence[Prompt], group_size: int = 1, key: tuple[int, ...] = (0, 0)
) -> list[Group]:
    return asyncio.run(groups_of(driver, prompts, group_size, key))
