"""An environment of your own: find a number between 1 and 7 by asking, in at most three turns.

    braid train examples/own_env.yaml

Methods may also be plain functions, which then run in threads, or in processes (env.run_in).
"""

from __future__ import annotations

import random

from braid.envs.agents.base import Opening, Step
from braid.types import Action, Prompt


class Guess:
    """The policy says a number; the environment says whether its own is higher or lower."""

    def __init__(self, highest: int = 7, turns: int = 3) -> None:
        self.highest, self.left = highest, turns

    async def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002  # a group has one seed: the same number
        self.number = random.Random(seed).randint(1, self.highest)
        return Opening([{"role": "user", "content": f"1 to {self.highest}?"}])

    async def step(self, action: Action) -> Step:
        self.left -= 1
        guess = int(action.text) if action.text.isdigit() else 0
        if guess == self.number:
            return Step(reward=1.0, is_done=True)
        hint = "higher" if guess < self.number else "lower"
        return Step([{"role": "user", "content": hint}], is_done=self.left == 0)

    async def close(self) -> None:
        """Nothing to free."""
