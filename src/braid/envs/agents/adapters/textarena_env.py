"""Games of TextArena. They draw from global random numbers, and give rewards at the end."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import textarena
from textarena.envs.registration import ENV_REGISTRY

from braid.envs.agents.base import EpisodeOver, Opening, Outcome, Seats, Step
from braid.envs.agents.hosts import HostedEnvs
from braid.errors import EnvError
from braid.functions import load_function
from braid.types import Action, Message, Prompt

from . import NO_WORDS, check_known, refused

_MAX_MOVES = 1000
"""Moves of opponents in a row."""


class _Game:
    """A game of TextArena; `kwargs` are those of textarena.make."""

    def __init__(self, id: str, num_players: int, seed: int, kwargs: Mapping[str, Any]) -> None:
        self._id, self.is_done, self._seen = id, False, [""] * num_players
        try:
            self._env: Any = textarena.make(id, **kwargs)
            self._env.reset(num_players=num_players, seed=seed)
        except LookupError as error:
            raise EnvError(f"{id} {NO_WORDS}") from error

    def observe(self) -> tuple[int, str]:
        """Whose turn it is, and all that the player sees."""
        return self._env.get_observation()

    def news(self, player: int, observation: str) -> list[Message]:
        """What the player has not read yet; most games show all that was said so far."""
        new, self._seen[player] = observation.removeprefix(self._seen[player]), observation
        return [{"role": "user", "content": new.strip()}]

    def move(self, text: str) -> None:
        self.is_done, _ = self._env.step(text)

    def end(self) -> tuple[Mapping[int, float], Mapping[int, Mapping[str, Any]]]:
        """Rewards of the players, and information on them."""
        return self._env.close()


class TextArena:
    """The policy plays seat `seat`; `opponent` plays the others: "random", or the path of a function of the
    observation that returns a move (package.module.function). Games for one player need none. Random moves
    are drawn from those that the game lists as available. `kwargs` are those of textarena.make. See
    base.AgentEnv."""

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
        self._random = random.Random(seed)
        self._game = _Game(self._id, self._num_players, seed, self._kwargs)
        messages = self._play_opponents()
        if self._game.is_done:
            raise EnvError(f"{self._id} ended before the first move of seat {self._seat}")
        return Opening(messages)

    def step(self, action: Action) -> Step:
        self._game.move(action.text)
        messages = self._play_opponents()
        if not self._game.is_done:
            return Step(messages)
        rewards, info = self._game.end()
        seat_info = info[self._seat]
        metrics = {"invalid_move": float(seat_info["invalid_move"]), "moves": float(seat_info["turn_count"])}
        return Step(reward=float(rewards[self._seat]), is_done=True, metrics=metrics)

    def close(self) -> None:
        """Nothing to free."""

    def _play_opponents(self) -> list[Message]:
        """Play until it is the policy's turn; returns what it has not read yet."""
        for _ in range(_MAX_MOVES):
            if self._game.is_done:
                return []
            player, observation = self._game.observe()
            if player == self._seat:
                return self._game.news(player, observation)
            self._game.move(self._opponent(observation))
        raise EnvError(f"{self._id} gave seat {self._seat} no turn in {_MAX_MOVES} moves")

    def _random_move(self, observation: str) -> str:
        lines = [
            line for line in observation.splitlines() if re.search("available|legal", line, re.IGNORECASE)
        ]
        moves = re.findall(r"'(\[[^][]+\])'", lines[-1]) if lines else []
        if not moves:
            raise EnvError(f"{self._id} lists no moves; set env.kwargs.opponent to a function")
        return self._random.choice(moves)


@dataclass(frozen=True, slots=True)
class _Dealt(Opening):
    """`player` has the first turn."""

    player: int = 0


@dataclass(frozen=True, slots=True)
class _Moved(Step):
    """`player` has the next turn; `rewards` are those of the players at the end."""

    player: int = 0
    rewards: Sequence[float] = ()


class _Table:
    """A game in its own process; the moves of all players come from outside. See base.AgentEnv."""

    def __init__(self, id: str, num_players: int, kwargs: Mapping[str, Any]) -> None:
        self._id, self._num_players, self._kwargs = id, num_players, kwargs

    def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        self._game = _Game(self._id, self._num_players, seed, self._kwargs)
        player, observation = self._game.observe()
        return _Dealt(self._game.news(player, observation), player=player)

    def step(self, action: Action) -> Step:
        self._game.move(action.text)
        if not self._game.is_done:
            player, observation = self._game.observe()
            return _Moved(self._game.news(player, observation), player=player)
        rewards, info = self._game.end()
        players = range(self._num_players)
        metrics = {f"{name}/seat{i}": float(info[i][key]) for i in players
                   for name, key in (("invalid_move", "invalid_move"), ("moves", "turn_count"))}  # fmt: skip
        return _Moved(is_done=True, metrics=metrics, rewards=[float(rewards[i]) for i in players])

    def close(self) -> None:
        """Nothing to free."""


class TextArenaSelfPlay:
    """The policy plays every seat, as agents `seat0`, `seat1` and so on. With `earlier_opponents` one seat is
    that of the agent `player`, number `seat` or one drawn by the seed, and earlier weights of the policy play
    the others, as `opponent1` and so on (`env.opponents`). `timeout_s` is the time limit of a game's reply to
    a move. `kwargs` are those of textarena.make. See base.MultiAgentEnv."""

    shared: HostedEnvs

    def __init__(
        self,
        id: str,
        *,
        num_players: int = 2,
        earlier_opponents: bool = False,
        seat: int | None = None,
        timeout_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        del id, kwargs  # see `share`
        if seat is not None and not (earlier_opponents and 0 <= seat < num_players):
            why = (
                f"below num_players={num_players}" if earlier_opponents else "for earlier_opponents=true only"
            )
            raise refused(f"seat={seat}: a seat is {why}")
        others = [f"opponent{i}" for i in range(1, num_players)]
        self._seat, self._timeout_s = seat, timeout_s
        self.opponents = tuple(others) if earlier_opponents else ()
        self.agents = (
            ("player", *others) if earlier_opponents else tuple(f"seat{i}" for i in range(num_players))
        )

    @staticmethod
    def share(
        _base_dir: Path,
        num_processes: int,
        *,
        id: str,
        num_players: int = 2,
        **kwargs: Any,
    ) -> HostedEnvs:
        """The processes of the games. Raises ConfigError."""
        kwargs = {
            name: kwargs[name] for name in kwargs if name not in ("earlier_opponents", "seat", "timeout_s")
        }
        check_known("TextArena", id, ENV_REGISTRY)
        return HostedEnvs(partial(_Table, id, num_players, kwargs), "process", num_processes)

    async def ready(self, task: Prompt) -> None:
        """Wait until the episode's table is ready to start."""
        self._table = self.shared()
        await self._table.ready(task)

    async def run(self, task: Prompt, seed: int, seats: Seats) -> Outcome:
        num = len(self.agents)
        drawn = random.Random(seed).randrange(num) if self.opponents else 0
        first = drawn if self._seat is None else self._seat
        agents = [self.agents[(i - first) % num] for i in range(num)]
        dealt = await self._in_time(self._table.start(task, seed))
        assert isinstance(dealt, _Dealt)
        player, messages = dealt.player, dealt.messages
        while True:
            try:
                action = await seats[agents[player]].reply(messages)
            except EpisodeOver:
                return Outcome(rewards=dict.fromkeys(self.agents, 0.0))
            moved = await self._in_time(self._table.step(action))
            assert isinstance(moved, _Moved)
            if moved.is_done:
                return Outcome(rewards=dict(zip(agents, moved.rewards, strict=True)), metrics=moved.metrics)
            player, messages = moved.player, moved.messages

    async def close(self) -> None:
        await self._table.close()

    async def _in_time(self, call: Awaitable[Opening | Step]) -> Opening | Step:
        late = f"the game took longer than env.kwargs.timeout_s={self._timeout_s:g}"
        deadline, loop = asyncio.timeout(self._timeout_s), asyncio.get_running_loop()
        ends_s = loop.time() + self._timeout_s
        try:
            async with deadline:
                reply = await call
        except TimeoutError as error:
            if deadline.expired():
                raise EnvError(late) from error
            raise
        if loop.time() > ends_s:  # a reply that was there at once, which the deadline cannot interrupt
            raise EnvError(late)
        return reply
