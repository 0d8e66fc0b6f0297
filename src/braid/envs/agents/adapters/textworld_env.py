"""Text adventures of TextWorld, whose parser is not thread-safe."""

from __future__ import annotations

import os
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import textworld
from textworld.generator import compile_game, make_game

from braid.envs.agents.base import Opening, Step
from braid.errors import EnvError
from braid.types import Action, Message, Prompt

from . import refused


class TextWorld:
    """A game that is made from the seed, or the file `game` (in the task's fields or here). The reward of a
    turn is what it adds to the score, of which a won game has 1. `has_commands` lists the admissible commands
    in each turn. Games that are made are kept in `folder`. See base.AgentEnv."""

    needs_process = True

    def __init__(
        self,
        game: str | None = None,
        *,
        num_rooms: int = 2,
        num_objects: int = 4,
        quest_length: int = 2,
        max_moves: int | None = None,
        has_commands: bool = False,
        folder: str | None = None,
    ) -> None:
        if game is not None and not isfile(game):
            raise refused(f"no such file: {Path(game).resolve()}")
        self._game, self._sizes = game, (num_rooms, num_objects, quest_length)
        self._max_moves, self._has_commands = max_moves, has_commands
        self._folder = Path(folder or f"{gettempdir()}/braid-textworld-{os.getuid()}")
        self._moves = self._score = 0

    def start(self, task: Prompt, seed: int) -> Opening:
        path = task.fields.get("game") or self._game or self._made(seed)
        if not isfile(path):
            raise EnvError(f"task {task.uid} has no game file {path}")
        infos = textworld.EnvInfos(
            feedback=True,
            objective=True,
            won=True,
            score=True,
            max_score=True,
            admissible_commands=self._has_commands,
        )
        self._env: Any = textworld.start(str(path), infos)
        return Opening(self._messages(self._env.reset()))

    def step(self, action: Action) -> Step:
        self._moves += 1
        state, score, is_done = self._env.step(
            action.text.strip().splitlines()[0] if action.text.strip() else ""
        )
        reward, self._score = (score - self._score) / max(1, state.max_score or 1), score
        if is_done or self._moves == self._max_moves:
            metrics = {"moves": float(self._moves), "won": float(bool(state.won))}
            return Step((), reward, is_done, not is_done, metrics)
        return Step(self._messages(state), reward)

    def close(self) -> None:
        if hasattr(self, "_env"):
            self._env.close()

    def _messages(self, state: Any) -> list[Message]:
        text = state.feedback.partition("\n>")[0]  # what follows is a status line
        if not self._moves:
            text = text[text.find(state.objective) :] if state.objective else text  # without the banner
        if self._has_commands:
            text = f"{text.strip()}\nCommands: {', '.join(sorted(state.admissible_commands))}"
        return [{"role": "user", "content": text.strip()}]

    def _made(self, seed: int) -> Path:
        """The game of this seed. It takes seconds to compile, and a group plays the same."""
        file = self._folder / f"{'-'.join(map(str, self._sizes))}-{textworld.__version__}-{seed}.z8"
        if file.exists():
            return file
        self._folder.mkdir(parents=True, exist_ok=True)
        options = textworld.GameOptions()
        options.nb_rooms, options.nb_objects, options.quest_length = self._sizes
        options.seeds = seed % 2**32
        with TemporaryDirectory(dir=self._folder) as folder:
            options.path = f"{folder}/{file.name}"
            os.environ["HOME"] = folder  # the compiler writes there
            compile_game(make_game(options), options)
            for made in (file.with_suffix(".json"), file):  # a game without its .json would be another one
                os.replace(f"{folder}/{made.name}", made)
        return file
