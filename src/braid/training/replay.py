"""The replay buffer: transitions of past episodes, from which off-policy learning draws.

Observations are stored once: an episode of D decisions takes D + 1 consecutive places of a ring, the last
of which has the final observation and no decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braid.data.lerobot import read_demonstrations
from braid.errors import DataError
from braid.types import Spaces, Status, Trajectory

_ROUNDING = 1e-4
"""By which an action may exceed its bounds."""
_OF_DECISIONS = ("actions", "rewards", "is_terminated", "has_next")


@dataclass(frozen=True, slots=True)
class Transitions:
    """B decisions: `observations` [B, ...] by name before and `next_observations` after each, `actions` [B,
    K], `rewards` [B], and `is_terminated` [B], whether the task itself ended with it. A time limit is no
    such end: the last observation of an episode that it cut has a value."""

    observations: dict[str, NDArray[Any]]
    actions: NDArray[np.float32]
    rewards: NDArray[np.float32]
    next_observations: dict[str, NDArray[Any]]
    is_terminated: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.rewards)

    @classmethod
    def of(cls, trajectory: Trajectory) -> Transitions:
        """The D decisions of a simulator's episode, in order. The reward of a chunk of actions is the sum
        over those that were executed, without a discount between them, as in RLinf; what shaping adds to
        the return is in the last one."""
        steps = trajectory.env_steps
        assert steps is not None, "only simulators have transitions"
        num = len(steps.rewards)
        is_executed = np.arange(steps.rewards.shape[1]) < steps.num_executed[:, None]
        rewards = np.where(is_executed, steps.rewards, 0.0).sum(1, dtype=np.float64)
        if trajectory.shaped is not None:
            rewards *= trajectory.shaped.factor
            rewards[-1] += trajectory.training_reward - rewards.sum()
        is_terminated = np.zeros(num, np.bool_)
        is_terminated[-1] = trajectory.status is Status.FINISHED
        return cls(
            {name: values[:-1] for name, values in steps.observations.items()},
            steps.inputs["actions"].reshape(num, -1).astype(np.float32),
            rewards.astype(np.float32),
            {name: values[1:] for name, values in steps.observations.items()},
            is_terminated,
        )


def joined(parts: Sequence[Transitions]) -> Transitions:
    """The transitions of all parts, in order."""

    def concatenated(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(values)

    return Transitions(
        {name: concatenated([part.observations[name] for part in parts]) for name in parts[0].observations},
        concatenated([part.actions for part in parts]),
        concatenated([part.rewards for part in parts]),
        {
            name: concatenated([part.next_observations[name] for part in parts])
            for name in parts[0].next_observations
        },
        concatenated([part.is_terminated for part in parts]),
    )


def read_transitions(folder: Path, key: str, spaces: Spaces, chunk: int) -> Iterator[Transitions]:
    """The decisions of each demonstration in a LeRobot folder, which config key `key` names, in chunks of
    `chunk` actions; the last chunk repeats its last action. An episode without an end (next.done) loses its
    last decision, after which no observation is recorded. Raises DataError if they have no rewards, or
    other observations or actions than `spaces`."""
    shapes = {name: tuple(shape) for name, shape in spaces.images.items()}
    if spaces.state_size:
        shapes["state"] = (spaces.state_size,)
    for episode in read_demonstrations(folder, key):
        if episode.rewards is None:
            raise DataError(f"{key}={folder} has no rewards; SAC needs the column next.reward of each frame")
        recorded = {name: values.shape[1:] for name, values in episode.observations.items()}
        if recorded != shapes or episode.actions.shape[1] != spaces.actions.size:
            raise DataError(
                f"{key}={folder} has observations {recorded} and {episode.actions.shape[1]} numbers per "
                f"action, the environment {shapes} and {spaces.actions.size}; record them in this environment"
            )
        if (most := np.abs(episode.actions).max()) > 1 + _ROUNDING:
            raise DataError(
                f"{key}={folder} has an action of size {most:g}, but SAC's are between -1 and 1; divide them "
                "by the environment's bounds (env.rescale_actions)"
            )
        num = -(-len(episode.actions) // chunk)
        places = np.arange(num * chunk)
        actions = episode.actions[places.clip(max=len(episode.actions) - 1)]
        rewards = np.pad(episode.rewards, (0, num * chunk - len(episode.rewards)))
        observations = {name: values[::chunk] for name, values in episode.observations.items()}
        is_terminated = np.arange(1, num + 1) == (num if episode.is_done else 0)
        kept = num if episode.is_done else num - 1
        if kept:
            yield Transitions(
                {name: values[:kept] for name, values in observations.items()},
                actions.reshape(num, -1)[:kept],
                rewards.reshape(num, chunk).sum(1)[:kept],
                {
                    name: np.concatenate([values[1:], values[-1:]])[:kept]
                    for name, values in observations.items()
                },
                is_terminated[:kept],
            )


class ReplayBuffer:
    """A ring of `capacity` observations with the decisions made on them. New episodes overwrite the
    oldest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._arrays: dict[str, NDArray[Any]] = {}
        self._end = self._size = 0
        """Place after the newest observation, and number of observations."""
        self._starts: NDArray[np.int64] | None = np.zeros(0, np.int64)
        """Places of the decisions, oldest first; None until they are asked for after a change."""

    def __len__(self) -> int:
        """Number of transitions."""
        return len(self._places())

    def add(self, episode: Transitions) -> None:
        """Add the decisions of an episode, in order; of one that is longer than the buffer, the last
        ones."""
        first = max(0, len(episode) + 1 - self._capacity)
        observations = {
            f"observations/{name}": np.concatenate([values[first:], episode.next_observations[name][-1:]])
            for name, values in episode.observations.items()
        }
        num = len(episode) - first
        decisions = {
            "actions": episode.actions[first:],
            "rewards": episode.rewards[first:],
            "is_terminated": episode.is_terminated[first:],
            "has_next": np.ones(num, np.bool_),
        }
        for name, values in (observations | decisions).items():
            if name not in self._arrays:
                self._arrays[name] = np.zeros((self._capacity, *values.shape[1:]), values.dtype)
        places = (self._end + np.arange(num + 1)) % self._capacity
        for name, values in observations.items():
            self._arrays[name][places] = values
        for name, values in decisions.items():
            self._arrays[name][places[:-1]] = values
        self._arrays["has_next"][places[-1]] = False
        self._end = int(places[-1] + 1) % self._capacity
        self._size = min(self._size + num + 1, self._capacity)
        self._starts = None

    def _ordered(self) -> NDArray[np.int64]:
        """Places of the observations, oldest first."""
        return (self._end - self._size + np.arange(self._size)) % self._capacity

    def _places(self) -> NDArray[np.int64]:
        """Places of the decisions, oldest first."""
        if self._starts is None:
            ordered = self._ordered()
            self._starts = ordered[self._arrays["has_next"][ordered]]
        return self._starts

    def draw(self, rng: np.random.Generator, count: int) -> Transitions:
        """Draw transitions uniformly, with replacement. The result depends on their order and on `rng`, not
        on their places."""
        starts = self._places()
        places = starts[rng.integers(0, len(starts), count)]
        after = (places + 1) % self._capacity
        named = {
            name.removeprefix("observations/"): values
            for name, values in self._arrays.items()
            if name not in _OF_DECISIONS
        }
        return Transitions(
            {name: values[places] for name, values in named.items()},
            self._arrays["actions"][places],
            self._arrays["rewards"][places],
            {name: values[after] for name, values in named.items()},
            self._arrays["is_terminated"][places],
        )

    def state(self) -> dict[str, Any]:
        """The contents, oldest first."""
        ordered = self._ordered()
        return {name: values[ordered] for name, values in self._arrays.items()}

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take the contents of `state`; with a smaller capacity, the newest."""
        kept = {name: values[-self._capacity :] for name, values in state.items()}
        self._arrays = {
            name: np.zeros((self._capacity, *values.shape[1:]), values.dtype) for name, values in kept.items()
        }
        self._size = len(next(iter(kept.values()), ()))
        for name, values in kept.items():
            self._arrays[name][: self._size] = values
        self._end = self._size % self._capacity
        self._starts = None if self._size else np.zeros(0, np.int64)
