"""The protocol of simulators: E environments stepped together, each with an episode of its own.

A simulator knows slots, not episodes: which episode runs where, its random numbers, and what is made of it are the
driver's (`rollout.drivers.simulators`). Nothing resets by itself: the driver says when, and with which seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from braid.types import ActionSpace, Prompt


@dataclass(frozen=True, slots=True)
class Tick:
    """What E environments answer to a reset or a step; entries of slots that took no part mean nothing.

    `observations` [E, D] float32; `rewards` [E]; `is_terminated` [E]: the task itself is over; `is_truncated` [E]: a limit
    of time cut it, so that its last state still has a value. `failures`: slot -> what went wrong there; such a
    slot has to be reset before its next step.
    """

    observations: NDArray[np.float32]
    rewards: NDArray[np.float32]
    is_terminated: NDArray[np.bool_]
    is_truncated: NDArray[np.bool_]
    failures: Mapping[int, str] = field(default_factory=dict)


class Simulator(Protocol):
    """E environments with flat observations of size D and one action space."""

    @property
    def num_envs(self) -> int: ...

    @property
    def observation_size(self) -> int: ...

    @property
    def action_space(self) -> ActionSpace: ...

    def reset(self, seeds: Mapping[int, int]) -> Tick:
        """Start a new episode in each slot named, from its seed: the same seed and actions give the same episode."""
        ...

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        """One env step in each slot named. An action is a whole number from 0, or A floats."""
        ...

    def close(self) -> None: ...


def reset_prompts(name: str, count: int) -> list[Prompt]:
    """Prompts of a simulator: each stands for a state to start from, drawn anew in each round."""
    return [Prompt(uid=f"{name}:{i}", source=name, token_ids=(), messages=()) for i in range(count)]
