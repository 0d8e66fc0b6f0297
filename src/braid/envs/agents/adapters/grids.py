"""FrozenLake and Sokoban, a new board for each seed, in GEM's protocol: reset(seed) -> (text, info),
step(text) -> (text, reward, is_done, is_truncated, info), where info["suffix"] is the board in symbols or,
with render_mode rgb_array, info["image"] its picture.

Rewards and symbols are ROLL's. Its FrozenLake draws the start and the goal too; here they are in opposite
corners.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from numpy.typing import NDArray

from . import refused

Seen = tuple[str, float, bool, bool, dict[str, Any]]
CELL = 16
"""Side of a cell in a picture, in pixels."""
_RGB = {
    "black": (0, 0, 0), "white": (255, 255, 255), "red": (220, 40, 40), "green": (40, 180, 60),
    "blue": (50, 80, 220), "yellow": (230, 210, 40), "purple": (150, 50, 200),
}  # fmt: skip


def _symbols(text: str) -> dict[int, tuple[str, str]]:
    """Symbols and meanings of cells, by code."""
    return {code: (entry[0], entry[2:]) for code, entry in enumerate(text.split(", "))}


class _Board(ABC):
    """A board game with one move per turn: the last group of `action_pattern` in the answer, one of
    `action_lookup`, in any case. Other answers get `format_penalty`."""

    actions: ClassVar[Mapping[int, str]]
    symbols: ClassVar[Mapping[int, tuple[str, str]]]
    """Code of a cell -> symbol, meaning."""
    colours: ClassVar[Sequence[str]]
    """Colours of the cells in a picture, by code."""
    rules: ClassVar[str]

    def __init__(
        self,
        *,
        max_steps: int = 20,
        action_pattern: str = "<answer>(.*?)</answer>",
        format_penalty: float = 0.0,
        grid_lookup: Mapping[Any, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        action_lookup: Mapping[Any, str] | None = None,
        env_instruction: str | None = None,
        render_mode: Literal["text", "rgb_array"] = "text",
    ) -> None:
        if render_mode not in ("text", "rgb_array"):
            raise refused(f"render_mode={render_mode!r} is not supported; set it to text or rgb_array")
        self._is_drawn = render_mode == "rgb_array"
        try:
            self._pattern = re.compile(action_pattern, re.DOTALL)
        except re.error as error:
            raise refused(f"action_pattern {action_pattern!r}: {error}") from None
        if not self._pattern.groups:
            raise refused(f"action_pattern {action_pattern!r} has no group; put the action in parentheses")
        self._max_steps, self._penalty = max_steps, format_penalty
        self._symbols = _by_code(grid_lookup) or {code: names[0] for code, names in self.symbols.items()}
        self._meanings = grid_vocab or dict(self.symbols.values())
        self._actions = _by_code(action_lookup) or dict(self.actions)
        self._rules = env_instruction or self.rules

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._num_steps = 0
        self._start(seed)
        signs, meanings = "Symbols", self._meanings
        if self._is_drawn:
            signs = "Colours"
            meanings = dict(zip(self.colours, dict(self.symbols.values()).values(), strict=True))
        legend = ", ".join(f"{sign}: {meaning}" for sign, meaning in meanings.items())
        rules = f"{self._rules}\n{signs}: {legend}\nActions: {', '.join(self._actions.values())}"
        return rules, self._shown()

    def step(self, answer: str) -> Seen:
        self._num_steps += 1
        match = self._pattern.search(answer)
        word = (match[self._pattern.groups] or "").strip() if match else ""
        chosen = next((code for code, name in self._actions.items() if name.lower() == word.lower()), None)
        before = self._cells()
        reward, is_over = self._move(chosen)
        is_effective = self._cells() != before
        text = f"Turn {self._num_steps}: "
        if chosen is None:
            reward += self._penalty
            text += "that was not a valid action."
        else:
            text += f"you moved {word}{'' if is_effective else ', without effect'}."
        is_done = is_over and not self._is_timed_out
        counts = {"valid": chosen is not None, "effective": is_effective, "success": self._is_won()}
        metrics = {name: float(value) for name, value in counts.items()}
        return text, reward, is_done, is_over and not is_done, self._shown() | {"metrics": metrics}

    @property
    def _is_timed_out(self) -> bool:
        return self._num_steps >= self._max_steps and not self._is_won()

    def _shown(self) -> dict[str, Any]:
        """The board: as symbols, or as pixels [height * CELL, width * CELL, 3]."""
        cells = self._cells()
        if not self._is_drawn:
            lines = ("".join(self._symbols.get(cell, "?") for cell in row) for row in cells)
            return {"suffix": "\n".join(lines)}
        pixels: NDArray[np.uint8] = np.array([_RGB[name] for name in self.colours], np.uint8)[np.array(cells)]
        return {"image": pixels.repeat(CELL, axis=0).repeat(CELL, axis=1)}

    @abstractmethod
    def _start(self, seed: int) -> None: ...

    @abstractmethod
    def _move(self, action: int | None) -> tuple[float, bool]:
        """(reward, whether the episode is over); None: no valid action."""

    @abstractmethod
    def _cells(self) -> list[list[int]]: ...

    @abstractmethod
    def _is_won(self) -> bool: ...


class FrozenLake(_Board):
    """Gymnasium's FrozenLake on a random map with a path to the goal: 1 at the goal, else 0."""

    actions: ClassVar = {0: "Left", 1: "Down", 2: "Right", 3: "Up"}
    symbols: ClassVar = _symbols("P player, _ empty, O hole, G goal, X player in hole, √ player on goal")
    colours: ClassVar = ("blue", "white", "black", "green", "red", "yellow")
    rules: ClassVar = (
        "You walk over a frozen lake from the start to the goal. Do not step into a hole. On slippery ice "
        "you may move in another direction than you want. Answer with one action per turn, such as "
        "<answer>Right</answer>."
    )

    def __init__(
        self,
        *,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        success_rate: float = 1 / 3,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._size, self._p, self._is_slippery, self._success_rate = size, p, is_slippery, success_rate

    def _start(self, seed: int) -> None:
        desc = generate_random_map(self._size, self._p, seed)
        self._env = FrozenLakeEnv(desc=desc, is_slippery=self._is_slippery, success_rate=self._success_rate)
        self._env.reset(seed=seed)

    def _move(self, action: int | None) -> tuple[float, bool]:
        if action is None:
            return 0.0, False
        _, reward, is_over, _, _ = self._env.step(action)
        return float(reward), bool(is_over)

    def _cells(self) -> list[list[int]]:
        cells = [[{b"S": 1, b"F": 1, b"H": 2, b"G": 3}[cell] for cell in row] for row in self._env.desc]
        row, column = divmod(int(self._env.s), self._size)
        cells[row][column] = {1: 0, 2: 4, 3: 5}[cells[row][column]]
        return cells

    def _is_won(self) -> bool:
        return self._env.desc.flat[int(self._env.s)] == b"G"


_MOVES = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}


class Sokoban(_Board):
    """Push all boxes onto targets: 1 for a box on a target, -1 for one off it, 10 for the last one, -0.1 a
    turn.

    Rooms are solvable: a random walk carves the floor, then boxes are pulled away from the targets at random
    for `search_depth` moves.
    """

    actions: ClassVar = {1: "Up", 2: "Down", 3: "Left", 4: "Right"}
    symbols: ClassVar = _symbols(
        "# wall, _ empty, O target, √ box on target, X box, P player, S player on target"
    )
    colours: ClassVar = ("black", "white", "red", "green", "yellow", "blue", "purple")
    rules: ClassVar = (
        "You push all boxes onto the targets of a Sokoban puzzle. You push a box by moving towards it from "
        "the next cell; you cannot push it into a wall or another box, nor pull it. Answer with one action "
        "per turn, such as <answer>Right</answer>."
    )

    def __init__(
        self,
        *,
        dim_room: Sequence[int] = (10, 10),
        num_boxes: int = 4,
        search_depth: int = 300,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._height, self._width = dim_room
        self._num_boxes, self._search_depth = num_boxes, search_depth
        if num_boxes < 1 or search_depth < 1 or min(dim_room) < 4 or (min(dim_room) - 2) ** 2 < num_boxes + 2:
            raise refused(f"dim_room={list(dim_room)} has no room for {num_boxes} boxes; enlarge it")

    def _start(self, seed: int) -> None:
        draw = random.Random(seed)
        while True:
            self._floor = self._carved(draw)
            if len(self._floor) > self._num_boxes + 1:
                self._player, *targets = draw.sample(sorted(self._floor), self._num_boxes + 1)
                self._targets, self._boxes = frozenset(targets), set(targets)
                for _ in range(self._search_depth):
                    self._pull(draw.choice(list(_MOVES.values())))
                if not self._boxes & self._targets:
                    return

    def _carved(self, draw: random.Random) -> frozenset[tuple[int, int]]:
        row, column = draw.randint(1, self._height - 2), draw.randint(1, self._width - 2)
        floor = {(row, column)}
        for _ in range(int(1.7 * (self._height + self._width))):
            down, right = draw.choice(list(_MOVES.values()))
            row = min(max(row + down, 1), self._height - 2)
            column = min(max(column + right, 1), self._width - 2)
            floor |= {(row, column), (row, min(column + 1, self._width - 2))}
        return frozenset(floor)

    def _pull(self, move: tuple[int, int]) -> None:
        """The reverse of a push."""
        (row, column), (down, right) = self._player, move
        there, behind = (row + down, column + right), (row - down, column - right)
        if there in self._floor and there not in self._boxes:
            if behind in self._boxes:
                self._boxes = self._boxes - {behind} | {self._player}
            self._player = there

    def _move(self, action: int | None) -> tuple[float, bool]:
        before = len(self._boxes & self._targets)
        if action is not None:
            (row, column), (down, right) = self._player, _MOVES[action]
            there, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
            if there in self._boxes and beyond in self._floor - self._boxes:
                self._boxes = self._boxes - {there} | {beyond}
            if there in self._floor - self._boxes:
                self._player = there
        gained = len(self._boxes & self._targets) - before
        return gained - 0.1 + 10.0 * self._is_won(), self._is_won() or self._is_timed_out

    def _cells(self) -> list[list[int]]:
        cells = [[0] * self._width for _ in range(self._height)]
        for row, column in self._floor:
            at = (row, column)
            is_target = at in self._targets
            cells[row][column] = 2 if is_target else 1
            if at in self._boxes:
                cells[row][column] = 3 if is_target else 4
            elif at == self._player:
                cells[row][column] = 6 if is_target else 5
        return cells

    def _is_won(self) -> bool:
        return self._boxes <= self._targets


def _by_code(texts: Mapping[Any, str] | None) -> dict[int, str]:
    return {int(code): text for code, text in (texts or {}).items()}
