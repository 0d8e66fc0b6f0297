"""A robot arm over a table, seen from above: "put the red block on the blue plate".

An ordinary Gymnasium environment with images, an instruction and a success signal, fast enough to train and
test vision-language-action policies on a CPU (a few microseconds of numpy a frame, no physics engine):

    env: {kind: gymnasium, id: tabletop.py:Tabletop}

`reset(seed=...)` alone decides the layout and the instruction. `expert` solves every episode, for
demonstrations.
"""

from __future__ import annotations

import string
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

SIZE = 64
"""Pixels of the square image; the table is the unit square."""
STEP, REACH, BLOCK, PLATE = 0.08, 0.05, 0.05, 0.11
"""Longest move of an env step per axis, distance at which a block can be grasped by default, half a block's
side, a plate's radius."""
HOLDING = 0.25
"""What holding the named block is worth under shaped rewards, in lengths of the table."""
COLORS = {
    "red": (220, 50, 40),
    "green": (50, 160, 60),
    "blue": (50, 90, 220),
    "yellow": (235, 200, 40),
    "purple": (150, 70, 180),
    "orange": (240, 130, 30),
}
_NAMES, _RGB = list(COLORS), np.array(list(COLORS.values()), np.uint8)


class Tabletop(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """Blocks and plates of different colors at random places, one of each named by the instruction.

    An action is (dx, dy, grip) in [-1, 1]: a positive `grip` closes the gripper, which grasps the nearest
    block within reach, otherwise it opens. The state is the gripper's position, and whether it is closed and
    holds a block. The episode succeeds, and ends, when the block lies on the plate and the gripper is open.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  # Gymnasium's

    def __init__(
        self,
        num_blocks: int = 3,
        num_plates: int = 2,
        num_colors: int = len(COLORS),
        reward: Literal["shaped", "sparse"] = "shaped",
        images: bool = True,
        max_episode_steps: int = 50,
        reach: float = REACH,
        render_mode: str | None = "rgb_array",
    ) -> None:
        """`shaped`: a success is worth 1, and so is each length of the table by which what remains to move
        becomes shorter. Grasping the named block is worth HOLDING, which is lost again when it is let go.
        Colors are the first `num_colors`. Without `images` the state also has the places of the block and the
        plate, for small networks."""
        self.num_blocks, self.num_plates, self.max_episode_steps = num_blocks, num_plates, max_episode_steps
        self.num_colors, self.reach = num_colors, reach
        self.reward, self.images, self.render_mode = reward, images, render_mode
        text = spaces.Text(60, charset=string.ascii_lowercase + " ")
        state = spaces.Box(0.0, 1.0, (4 if images else 8,), np.float32)
        parts: dict[str, spaces.Space] = {"state": state, "instruction": text}
        if images:
            parts = {"image": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8), **parts}
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Box(-1.0, 1.0, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:  # noqa: ARG002
        super().reset(seed=seed)
        places = self._places(self.num_blocks + self.num_plates + 1)
        self.plates, self.blocks = places[: self.num_plates], places[self.num_plates : -1]
        self.gripper, self.is_closed, self.held = places[-1].copy(), False, -1
        self.plate_colors = self.np_random.permutation(self.num_colors)[: self.num_plates]
        self.block_colors = self.np_random.permutation(self.num_colors)[: self.num_blocks]
        self.block, self.plate = map(int, self.np_random.integers((self.num_blocks, self.num_plates)))
        block, plate = _NAMES[self.block_colors[self.block]], _NAMES[self.plate_colors[self.plate]]
        self.instruction = f"put the {block} block on the {plate} plate"
        self._left, self.num_steps = self._distance(), 0
        return self._observed(), {"success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict]:
        self.gripper = np.clip(self.gripper + STEP * np.clip(action[:2], -1, 1), 0, 1)
        if self.held >= 0:
            self.blocks[self.held] = self.gripper
        self.is_closed = bool(action[2] > 0)
        if not self.is_closed:
            self.held = -1
        elif self.held < 0:
            far = np.linalg.norm(self.blocks - self.gripper, axis=1)
            self.held = int(far.argmin()) if far.min() < self.reach else -1
        on_plate = np.linalg.norm(self.blocks[self.block] - self.plates[self.plate]) < PLATE - BLOCK / 2
        is_success = bool(on_plate and not self.is_closed)
        before, self._left = self._left, self._distance()
        reward = float(is_success) + (before - self._left if self.reward == "shaped" else 0.0)
        self.num_steps += 1
        is_truncated = self.num_steps >= self.max_episode_steps and not is_success
        return self._observed(), reward, is_success, is_truncated, {"success": is_success}

    def render(self) -> NDArray[np.uint8]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The image [64, 64, 3]. The last things drawn lie on top."""
        image = np.full((SIZE, SIZE, 3), (205, 190, 165), np.uint8)
        for place, color in zip(self.plates, self.plate_colors, strict=True):
            _draw(image, _DISC, place, _RGB[color])
            _draw(image, _CENTER, place, np.array((245, 245, 245), np.uint8))
        for place, color in zip(self.blocks, self.block_colors, strict=True):
            _draw(image, _SQUARE, place, _RGB[color])
        _draw(image, _CLOSED if self.is_closed else _OPEN, self.gripper, np.zeros(3, np.uint8))
        return image

    def _places(self, count: int) -> NDArray[np.float64]:
        """Random places [count, 2] that don't overlap; begins again where too little room is left."""
        while True:
            places = self.np_random.uniform(0.12, 0.88, (20 * count, 2))
            chosen = places[:1]
            for place in places[1:]:
                if len(chosen) < count and np.square(chosen - place).sum(1).min() > (2 * PLATE) ** 2:
                    chosen = np.vstack([chosen, place])
            if len(chosen) == count:
                return chosen

    def _distance(self) -> float:
        """What remains to do: the way from the gripper to the block and from the block to the plate, less
        what holding it is worth."""
        block, plate = self.blocks[self.block], self.plates[self.plate]
        way = np.linalg.norm(self.gripper - block) + np.linalg.norm(block - plate)
        return float(way) - HOLDING * (self.held == self.block)

    def _observed(self) -> dict[str, Any]:
        state = np.array([*self.gripper, self.is_closed, self.held >= 0], np.float32)
        if self.images:
            return {"image": self.render(), "state": state, "instruction": self.instruction}
        places = (self.blocks[self.block], self.plates[self.plate])
        return {"state": np.concatenate([state, *places], dtype=np.float32), "instruction": self.instruction}


def expert(env: gymnasium.Env) -> NDArray[np.float32]:
    """The action that brings the named block to the named plate on the shortest way."""
    table = env.unwrapped
    assert isinstance(table, Tabletop), "an expert for this environment only"
    is_held = table.held == table.block
    way = (table.plates[table.plate] if is_held else table.blocks[table.block]) - table.gripper
    is_there = bool(np.abs(way).max() <= STEP)  # the gripper acts after the move
    return np.array([*np.clip(way / STEP, -1, 1), 1 if is_held != is_there else -1], np.float32)


def _stamp(radius: float, *, is_square: bool = False, hole: float = -1.0) -> NDArray[np.bool_]:
    """The pixels of a shape around its center."""
    half = round(radius * SIZE)
    y, x = np.mgrid[-half : half + 1, -half : half + 1]
    distance = np.maximum(abs(x), abs(y)) if is_square else np.hypot(x, y)
    return (distance <= half) & (distance >= hole * SIZE)


_DISC, _CENTER, _SQUARE = _stamp(PLATE), _stamp(0.6 * PLATE), _stamp(0.8 * BLOCK, is_square=True)
_OPEN, _CLOSED = _stamp(0.06, hole=0.045), _stamp(0.03)


def _draw(
    image: NDArray[np.uint8], stamp: NDArray[np.bool_], place: NDArray, color: NDArray[np.uint8]
) -> None:
    """Color the pixels of the stamp, cut at the image's edges."""
    half, last = len(stamp) // 2, SIZE - 1
    x, y = (np.asarray(place) * last + 0.5).astype(int)
    left, top, right, bottom = max(x - half, 0), max(y - half, 0), min(x + half, last), min(y + half, last)
    part = stamp[top - y + half : bottom - y + half + 1, left - x + half : right - x + half + 1]
    image[top : bottom + 1, left : right + 1][part] = color
