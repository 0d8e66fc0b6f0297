"""The simulator protocol: E environments (slots) stepped together, each running a separate episode. The engine
(`rollout.engines.simulators`) assigns episodes to slots, and resets them with explicit seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from braid.types import ActionSpace, Prompt


@dataclass(frozen=True, slots=True)
class Tick:
    """Result of a reset or step of E environments; entries of slots that did not take part are undefined.

    `observations` [E, D] float32; `rewards` [E]; `is_terminated` [E]: the task itself ended; `is_truncated`
    [E]: a time limit ended the episode, so its last state still has a value. `failures`: slot -> error
    message; a failed slot must be reset before its next step.
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
        """Start a new episode in each given slot, from its seed. Same seed and actions give the same
        episode."""
        ...

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        """Run one env step in each given slot. An action is an integer from 0, or a vector of A floats."""
        ...

    def close(self) -> None: ...


def reset_prompts(name: str, count: int) -> list[Prompt]:
    """Prompts of a simulator: each stands for a reset state, which is drawn anew in each round."""
    return [Prompt(uid=f"{name}:{i}", source=name, token_ids=(), messages=()) for i in range(count)]
