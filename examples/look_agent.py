"""A game played by sight, for look_agent.yaml: walk to the goal of a board that each turn shows as a picture.
Writes the games to imitate first:

    python examples/look_agent.py examples/look_agent
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from braid.envs.agents.base import Opening, Step
from braid.images import data_uri, image_of
from braid.types import Action, Message, Prompt

SIZE = 3
"""Cells along a side of the board."""
CELL = 16
"""Side of a cell, in pixels."""
FLOOR, GOAL, PLAYER = (40, 40, 40), (60, 200, 80), (70, 90, 230)
MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Changes of row and column."""
SHARE_GUESSED = 0.6
"""Of the turns to imitate, those that guess a move; the others say first where player and goal are."""


def draw(*cells: tuple[NDArray[np.int64], tuple[int, int, int]]) -> NDArray[np.uint8]:
    """Pixels [48, 48, 3] of a board with cells (row, column) of other colours than the floor's."""
    pixels = np.full((SIZE, SIZE, 3), FLOOR, np.uint8)
    for cell, colour in cells:
        pixels[tuple(cell)] = colour
    return pixels.repeat(CELL, axis=0).repeat(CELL, axis=1)


def named(cell: NDArray[np.int64]) -> str:
    """A cell as on a chess board: c1 is the third of the first row."""
    row, column = cell
    return f"{'abc'[column]}{row + 1}"


class Board:
    """Cells of the player and the goal, each as [row, column]."""

    def __init__(self, rng: np.random.Generator) -> None:
        places = rng.choice(SIZE * SIZE, 2, replace=False)
        self.player, self.goal = np.stack(np.divmod(places, SIZE), axis=1)

    @property
    def distance(self) -> int:
        """Number of moves of a shortest way to the goal."""
        return int(np.abs(self.player - self.goal).sum())

    @property
    def picture(self) -> NDArray[np.uint8]:
        return draw((self.goal, GOAL), (self.player, PLAYER))

    def after(self, move: str) -> NDArray[np.int64]:
        """The player's cell after a move, which walls stop."""
        return np.clip(self.player + MOVES[move], 0, SIZE - 1)

    def short_move(self) -> str:
        """The first of MOVES that comes nearer to the goal."""
        return next(move for move in MOVES if np.abs(self.after(move) - self.goal).sum() < self.distance)


class Walk:
    """The policy sees the board and says where to go; it has as many moves as a shortest way takes. `shows`:
    the board, an empty one, or another one with which it can only guess."""

    def __init__(self, shows: Literal["board", "empty", "other"] = "board") -> None:
        self.shows = shows

    async def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002  # a group has one seed: the same board
        self.rng = np.random.default_rng(seed)
        self.board = Board(self.rng)
        self.moves_left = self.board.distance
        return Opening([self.look()])

    def look(self) -> Message:
        """The message with a picture that the policy reads before a move."""
        if self.shows == "empty":
            picture = draw()
        else:
            picture = (self.board if self.shows == "board" else Board(self.rng)).picture
        return {"role": "user", "content": [{"type": "image", "image": picture}]}

    async def step(self, action: Action) -> Step:
        move = action.text.rpartition(" ")[2]
        if move in MOVES:
            self.board.player = self.board.after(move)
        self.moves_left -= 1
        if self.board.distance == 0:
            return Step(reward=1.0, is_done=True)
        return Step(is_done=True) if self.moves_left == 0 else Step([self.look()])

    async def close(self) -> None:
        """Nothing to free."""


def game(rng: np.random.Generator) -> list[dict[str, Any]]:
    """The messages of a game to imitate, on any board."""
    board, messages = Board(rng), list[dict[str, Any]]()
    for _ in range(board.distance):
        if board.distance == 0:
            break
        move = board.short_move()
        answer = f"look {named(board.player)} {named(board.goal)}: {move}"
        if rng.random() < SHARE_GUESSED:
            move = str(rng.choice(list(MOVES)))
            answer = f"guess {move}"
        picture = {"type": "image", "image": data_uri(image_of(board.picture, Path()))}
        messages += [
            {"role": "user", "content": [picture]},
            {"role": "assistant", "content": answer},
        ]
        board.player = board.after(move)
    return messages


def main() -> None:
    folder, rng = Path(sys.argv[1]), np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    games = (json.dumps({"messages": game(rng)}) for _ in range(4_000))
    (folder / "sft.jsonl").write_text("".join(line + "\n" for line in games))


if __name__ == "__main__":
    main()
