"""A planner and workers, as RLinf's multi-agent workflow has them, in braid's form."""

from __future__ import annotations

import asyncio

from braid.envs.agents.base import Outcome, Seats
from braid.types import Prompt


class Team:
    """The planner tells each worker the same; the last worker's answer is that of the episode."""

    agents = ("planner",)

    def __init__(
        self,
        max_planner_turns: int,
        max_worker_turns: int,
        max_workers_per_planner: int,
        max_toolcall_per_worker: int,
    ) -> None:
        self._turns, self._num_workers = max_planner_turns, max_workers_per_planner
        del max_worker_turns, max_toolcall_per_worker

    async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
        heard = task.messages
        for _ in range(self._turns):
            plan = await seats["planner"].reply(heard)
            workers = [seats.open("worker") for _ in range(self._num_workers)]
            said = await asyncio.gather(
                *(w.reply([{"role": "user", "content": plan.text[:4]}]) for w in workers)
            )
            heard = [{"role": "user", "content": " ".join(action.text for action in said)}]
        return Outcome()

    async def close(self) -> None:
        pass
