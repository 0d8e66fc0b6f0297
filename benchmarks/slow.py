"""Environments that reply after a log-normal time: mean 50 ms, 99th percentile 500 ms."""

from __future__ import annotations

import asyncio
import random
import time

from braid.envs.agents.base import Opening, Step
from braid.types import Action, Prompt

MU, SIGMA = -4.0, 1.42
REPLY = "abc: 17 or more? "


def latency(number: int, turn: int) -> float:
    return random.Random(1000 * number + turn).lognormvariate(MU, SIGMA)


class Slow:
    """Replies to each turn after a while. The first attempt of the episode `hangs` never replies to the
    second."""

    def __init__(self, turns: int, hangs: int | None = None, scale: float = 1.0) -> None:
        self.turns, self.hangs, self.scale, self.turn = turns, hangs, scale, 0

    def start(self, task: Prompt, seed: int) -> Opening:
        self.number = int(task.uid)
        return Opening()

    def wait(self) -> float:
        self.turn += 1
        return (
            3600.0
            if self.number == self.hangs and self.turn == 2
            else self.scale * latency(self.number, self.turn)
        )

    def reply(self) -> Step:
        return Step([{"role": "user", "content": REPLY}], is_done=self.turn == self.turns)

    def step(self, action: Action) -> Step:
        time.sleep(self.wait())
        return self.reply()

    def close(self) -> None:
        pass


class AsyncSlow(Slow):
    async def step(self, action: Action) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(self.wait())
        return self.reply()
