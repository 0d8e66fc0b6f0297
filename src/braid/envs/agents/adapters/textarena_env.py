"""Games of TextArena. They draw from global random numbers, and give rewards at the end."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from braid.envs.agents.base import Opening, Step
from braid.errors import EnvError
from braid.functions import load_function
from braid.types import Action, Message, Prompt

from . import NO_WORDS, check_known

_MAX_MOVES = 1000
"""Moves of opponents in a row."""


class TextArena:
    """The policy plays seat `seat`; `opponent` plays the others: "random", or the path of a function of the observation
    that returns a move (package.module.function). Games for one player need none. Random moves are drawn from those
    that the game lists as available. `kwargs` are those of textarena.make. See base.AgentEnv."""

    needs_process = True

    def __init__(
        self,
        id: str,
        *,
        seat: int = 0,
        opponent: str | None = None,
        num_players: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_known("TextArena", id, ENV_REGISTRY)
        self._id, self._seat, self._kwargs = id, seat, kwargs
        self._num_players = num_players or (1 if opponent is None else 2)
        self._opponent: Callable[[str], str] = self._random_move
        if opponent not in (None, "random"):
            self._opponent = load_function(opponent, base_dir=Path.cwd(), key="env.kwargs.opponent")

    def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        self._random, self._seen, self._is_done = random.Random(seed), "", False
        try:
            self._env: Any = textarena.make(self._id, **self._kwargs)
            self._env.reset(num_players=self._num_players, seed=seed)
        except LookupError as error:
            raise EnvError(f"{self._id} {NO_WORDS}") from error
        messages = self._play_opponents()
        if self._is_done:
            raise EnvError(f"{self._id} ended before the first move of seat {self._seat}")
        return Opening(messages)

    def step(self, action: Action) -> Step:
        self._is_done, _ = self._env.step(action.text)
        messages = self._play_opponents()
        if not self._is_done:
            return Step(messages)
        rewards, info = self._env.close()
        of = info[self._seat]
        metrics = {"invalid_move": float(of["invalid_move"]), "moves": float(of["turn_count"])}
        return Step(reward=float(rewards[self._seat]), is_done=True, metrics=metrics)

    def close(self) -> None:
        """Nothing to free."""

    def _play_opponents(self) -> list[Message]:
        """Play until it is the policy's turn; returns what it has not read yet."""
        for _ in range(_MAX_MOVES):
            if self._is_done:
                return []
            player, seen = self._env.get_observation()
            if player == self._seat:
                # Most games show all that was said so far.
                new, self._seen = seen.removeprefix(self._seen), seen
                return [{"role": "user", "content": new.strip()}]
            self._is_done, _ = self._env.step(self._opponent(seen))
        raise EnvError(f"{self._id} gave seat {self._seat} no turn in {_MAX_MOVES} moves")

    def _random_move(self, seen: str) -> str:
        lines = [line for line in seen.splitlines() if re.search("available|legal", line, re.IGNORECASE)]
        moves = re.findall(r"'(\[[^][]+\])'", lines[-1]) if lines else []
        if not moves:
            raise EnvError(f"{self._id} lists no moves; set env.kwargs.opponent to a function")
        return self._random.choice(moves)
