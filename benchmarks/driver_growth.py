"""What the driver receives of a round, in bytes, at four sizes each of tokens, turns and images.

Groups as rollout workers hold them become the metadata that the driver gets: of trajectories when a group
finishes, of rows when the rollout buffer has them. The figure is the pickled size relative to the smallest
round; integers of more digits take a few bytes more.

    python benchmarks/driver_growth.py

Exits with 1 when a size grows by more than a fifth while the contents grow a thousandfold.
"""

from __future__ import annotations

import pickle
import sys

import numpy as np

from braid.algorithms.recipes import RECIPES
from braid.rollout.collector import metadata_of
from braid.rollout.rows import group_rows
from braid.training.rollout_buffer import RolloutBuffer
from braid.types import EnvSteps, Group, Prompt, Segment, Trajectory, Turn

GOAL, GROUPS, GROUP = 1.2, 16, 8
SIZES = {"tokens": (100, 1_000, 10_000, 100_000), "turns": (1, 10, 100, 1_000), "images": (1, 10, 100, 1_000)}


def trajectory(prompt: Prompt, sample: int, kind: str, size: int) -> Trajectory:
    """An answer of `size` tokens, of as many turns, or an episode with as many images of 32 x 32 pixels."""
    if kind == "images":
        images = np.broadcast_to(np.uint8(0), (size + 1, 32, 32, 3))
        zeros = np.zeros(size, np.float32)
        steps = EnvSteps(images, np.zeros(size, np.int64), zeros, zeros, 3)  # type: ignore[arg-type]
        return Trajectory(prompt, sample, env_steps=steps, reward=1.0)
    turns, tokens = (1, size) if kind == "tokens" else (size, 20)
    written = [Turn([1] * 20, [2] * tokens, [-1.0] * tokens, "stop", 3) for _ in range(turns)]
    return Trajectory(prompt, sample, segments=[Segment(written)], reward=1.0)


def driver_bytes(kind: str, size: int) -> int:
    """Bytes of metadata of a round."""
    num_bytes, rows = 0, []
    for i in range(GROUPS):
        prompt = Prompt(f"p:{i}", "p", (1,) * 20, ())
        members = [trajectory(prompt, sample, kind, size) for sample in range(GROUP)]
        group = Group(prompt, members, key=(0, 1, i))
        num_bytes += len(pickle.dumps(metadata_of(group)))
        rows.append(group_rows(group, 0, 0))
    return num_bytes + len(pickle.dumps(RolloutBuffer(RECIPES["grpo"], None).open(rows)))


def main() -> None:
    worst = 1.0
    for kind, sizes in SIZES.items():
        figures = [driver_bytes(kind, size) for size in sizes]
        worst = max(worst, *(figure / figures[0] for figure in figures))
        listed = ", ".join(f"{size:,}: {figure:,}" for size, figure in zip(sizes, figures, strict=True))
        print(f"bytes of {GROUPS} groups of {GROUP}, by {kind}: {listed}")
    print(f"largest growth {worst:.3f}, to be at most {GOAL}")
    sys.exit(worst > GOAL)


if __name__ == "__main__":
    main()
