"""The simulator protocol: E environments (slots) stepped together, each running a separate episode. The
engine (`rollout.engines.simulators`) assigns episodes to slots, and resets them with explicit seeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from braid.errors import ConfigError, Problem
from braid.types import Prompt, Spaces


@dataclass(frozen=True, slots=True)
class Tick:
    """Result of a reset, or of a chunk of H actions (0 for a reset), of E environments; entries of slots that
    did not take part are undefined.

    `observations` [E, ...] by name, after the last executed action: arrays, or tensors on the device of a
    simulator whose observations are tensors. The rest is on the host: `rewards` [E, H]; `num_executed` [E]:
    the actions until the episode ended, or all; `is_terminated` [E]: the task itself ended; `is_truncated`
    [E]: a time limit ended the episode, so its last state still has a value; `success` [E, H]: whether the
    task was fulfilled after each action, nan where the environment does not say. `instructions`: slot -> text
    of its episode, after a reset. `frames`: slot -> a picture [h, w, 3] after the reset or each executed
    action, for the slots that are filmed. `failures`: slot -> error message; a failed slot must be reset
    before its next step.
    """

    observations: dict[str, Any]
    rewards: NDArray[np.float32]
    num_executed: NDArray[np.int32]
    is_terminated: NDArray[np.bool_]
    is_truncated: NDArray[np.bool_]
    success: NDArray[np.float32]
    instructions: dict[int, str] = field(default_factory=dict)
    frames: dict[int, list[NDArray[np.uint8]]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        num_envs: int,
        spaces: Spaces,
        num_actions: int,
        images: Mapping[str, NDArray[np.uint8]] | None = None,
    ) -> Tick:
        """With zeros; `images` [E, ...] by name are used as they are if given."""
        state = {"state": np.zeros((num_envs, spaces.state_size), np.float32)} if spaces.state_size else {}
        if images is None:
            images = {name: np.zeros((num_envs, *shape), np.uint8) for name, shape in spaces.images.items()}
        return cls(
            {**state, **images},
            np.zeros((num_envs, num_actions), np.float32),
            np.zeros(num_envs, np.int32),
            np.zeros(num_envs, np.bool_),
            np.zeros(num_envs, np.bool_),
            np.full((num_envs, num_actions), np.nan, np.float32),
        )

    def take(self, part: Tick, first: int) -> None:
        """Take the results of consecutive slots, the first of which is `first` here."""
        slots = slice(first, first + len(part.num_executed))
        for name, values in part.observations.items():
            self.observations[name][slots] = values
        for name in ("rewards", "num_executed", "is_terminated", "is_truncated", "success"):
            getattr(self, name)[slots] = getattr(part, name)
        for name in ("instructions", "frames", "failures"):
            getattr(self, name).update({first + slot: value for slot, value in getattr(part, name).items()})


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Rules that hold for environments of any origin; see config.rollout.SimulatorEnv. `max_episode_steps` is
    None for the environment's own limit."""

    max_episode_steps: int | None = None
    ignore_terminations: bool = False
    relative_reward: bool = False
    reward_scale: float = 1.0
    rescale_actions: bool = False
    step_penalty: float = 0.0

    def reward(self, reward: float, before: float) -> tuple[float, float]:
        """The reward of an env step: s_t = scale * r_t - penalty, or s_t - s_{t-1} if relative, with s_0 = 0.
        Then s_t, which is `before` of the next env step."""
        scaled = self.reward_scale * reward - self.step_penalty
        return scaled - before if self.relative_reward else scaled, scaled


AS_IT_IS = EpisodeRules()


class Simulator(Protocol):
    """E environments with the same spaces."""

    @property
    def num_envs(self) -> int: ...

    @property
    def spaces(self) -> Spaces: ...

    @property
    def resets_together(self) -> bool:
        """Whether a reset ends the episodes of all slots."""
        ...

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Tick:
        """Start a new episode in each given slot, from its seed. Same seed and actions give the same
        episode. Those in the `filmed` slots give pictures."""
        ...

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        """Execute a chunk of H actions in each given slot, until its episode ends: integers from 0 [H], or
        vectors of A floats [H, A]."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Overlapping(Simulator, Protocol):
    """A simulator that goes on while its caller does something else. Calls that overlap name different slots,
    and are finished in the order in which they began; one that is never finished has no effect on later
    ones."""

    def begin_reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Callable[[], Tick]:
        """Begin a `reset`; the function that is returned waits for its result."""
        ...

    def begin_step(self, actions: Mapping[int, NDArray]) -> Callable[[], Tick]:
        """Begin a `step`; see `begin_reset`."""
        ...


def as_array(value: Any) -> Any:
    """A tensor as an array on the host; anything else as it is. Simulators need no torch of their own."""
    return value.cpu().numpy() if hasattr(value, "cpu") else value


def refused(key: str, why: str) -> ConfigError:
    """The error of a key of the section env."""
    return ConfigError([Problem(f"env.{key}", why, "env")])


def reset_prompts(name: str, count: int, seeds: Sequence[int] | None = None) -> list[Prompt]:
    """Prompts of a simulator: each stands for a reset state, that of its seed, or one drawn anew in each
    round."""
    of_seeds = [{}] * count if seeds is None else [{"reset_seed": seed} for seed in seeds]
    return [
        Prompt(uid=f"{name}:{i}", source=name, token_ids=(), messages=(), fields=fields)
        for i, fields in enumerate(of_seeds)
    ]
