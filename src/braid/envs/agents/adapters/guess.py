"""Guess a number: the environment answers whether it is higher or lower.

Binary search wins with probability min(1, (2**tries - 1) / highest), and no policy more often.
"""

from __future__ import annotations

import random
import re

from braid.envs.agents.base import Opening, Step
from braid.types import Action, Prompt


class Guess:
    """The first number in an answer is the guess; an answer without one costs a try. The reward is 1 for a
    hit. See base.AgentEnv."""

    def __init__(self, highest: int = 15, tries: int = 4) -> None:
        self._highest, self._tries = highest, tries

    async def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        self._secret, self._left = random.Random(seed).randint(1, self._highest), self._tries
        rules = f"Guess a number from 1 to {self._highest} in {self._tries} tries."
        return Opening([{"role": "user", "content": rules}])

    async def step(self, action: Action) -> Step:
        self._left -= 1
        number = re.search(r"[0-9]+", action.text)
        guess = int(number[0][:9]) if number else None
        if guess == self._secret:
            return Step(reward=1.0, is_done=True, metrics={"guesses": float(self._tries - self._left)})
        if not self._left:
            return Step(is_done=True, metrics={"guesses": float(self._tries)})
        if guess is None:
            reply = "say a number"
        else:
            reply = "higher" if guess < self._secret else "lower"
        return Step([{"role": "user", "content": reply}])

    async def close(self) -> None:
        """Nothing to free."""
