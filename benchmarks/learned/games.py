"""Games of the learned benchmarks that no adapter has."""

from __future__ import annotations

import random
from collections.abc import Mapping

from braid.envs.agents.base import Opening, Outcome, Seat, Step
from braid.types import Action, Message, Prompt


def says(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


class Signals:
    """A sender sees one of `targets`, and sends one of `symbols`, a, b, ...; a receiver guesses the target
    from it.

    A message that is no symbol loses, so that the channel has no more symbols than that: no policy wins more
    often than symbols / targets. With env.tasks = targets, all targets are equally frequent in a round:
    otherwise, the receiver learns which are more frequent faster than what a symbol means.
    """

    agents = ("sender", "receiver")

    def __init__(self, targets: int = 8, symbols: int = 4) -> None:
        self.targets, self.symbols = targets, "abcdefgh"[:symbols]

    async def run(self, task: Prompt, seed: int, seats: Mapping[str, Seat]) -> Outcome:
        target = str(int(task.uid.rpartition(":")[2]) % self.targets + 1)
        sent = await seats["sender"].reply(says(f"send {target}"))
        if len(sent.text) != 1 or sent.text not in self.symbols:
            return Outcome()
        guess = await seats["receiver"].reply(says(f"read {sent.text}"))
        return Outcome(float(guess.text == target))

    async def close(self) -> None:
        """Nothing to free."""


class Kuhn:
    """Kuhn poker on the first seat, against an opponent who chooses uniformly at random. The reward is what
    is won.

    Both put in 1 and get one of the cards J, Q, K. A bet is 1 more, and is answered by call or fold. Any
    other answer than the allowed ones folds.
    """

    async def start(self, task: Prompt, seed: int) -> Opening:
        luck = random.Random(seed)
        mine, theirs = luck.sample("JQK", 2)
        self.wins, self.opponent_is_active = "JQK".index(mine) > "JQK".index(theirs), luck.random() < 0.5
        self.has_checked = False
        return Opening(says(f"{mine} check or bet"))

    async def step(self, action: Action) -> Step:
        if self.has_checked:  # the opponent has bet
            return self._end(2 if action.text == "call" else 0)
        if action.text == "bet":
            return self._end(2) if self.opponent_is_active else Step(reward=1.0, is_done=True)
        if action.text != "check":
            return self._end(0)
        if not self.opponent_is_active:
            return self._end(1)
        self.has_checked = True
        return Step(says("bet call or fold"))

    def _end(self, stake: int) -> Step:
        """The cards decide over the stake; 0 is a fold."""
        return Step(reward=float(stake if self.wins and stake else -max(stake, 1)), is_done=True)

    async def close(self) -> None:
        """Nothing to free."""
