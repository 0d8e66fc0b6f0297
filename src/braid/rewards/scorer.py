"""Rewards of trajectories: the weighted sum of the config's parts, plus what the environment gave.

Owns weights, retries, limits on calls in flight, and what a failure means: the trajectory becomes invalid, with the
part and the reason. It is never scored 0. What each part computes is parts.py's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from braid.config.reward import MathReward, ReasoningGymReward, RewardConfig
from braid.errors import ConfigError, Problem, RewardError
from braid.types import Trajectory

from .parts import Part, build_part

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Weighted:
    """A part under its name. At most `max_calls` of its calls are in flight together."""

    name: str
    weight: float
    part: Part
    max_calls: int


def build_scorer(config: RewardConfig, *, base_dir: Path) -> Scorer:
    """The scorer that `config` describes; files of functions are looked up from `base_dir` (the config's folder).

    Raises ConfigError for equal names of parts, bad patterns, and functions that cannot be found or called.
    """
    parts: list[_Weighted] = []
    for i, part in enumerate(config.parts):
        key, name = f"reward.parts[{i}]", part.name or part.kind
        if any(name == other.name for other in parts):
            raise ConfigError(
                [
                    Problem(
                        f"{key}.name",
                        f"another part is named {name!r} already; give this one its own",
                        "config",
                    )
                ]
            )
        built = build_part(
            part, timeout_s=config.timeout_s, concurrency=config.concurrency, base_dir=base_dir, key=key
        )
        is_process = isinstance(part, MathReward | ReasoningGymReward)
        max_calls = min(config.concurrency, os.cpu_count() or 1) if is_process else config.concurrency
        parts.append(_Weighted(name, part.weight, built, max_calls))
    return Scorer(parts, retries=config.retries, concurrency=config.concurrency)


class Scorer:
    """Scores trajectories in place. Built by `build_scorer`; `close` ends its threads and processes."""

    def __init__(self, parts: Sequence[_Weighted], *, retries: int, concurrency: int) -> None:
        self._parts = tuple(parts)
        self._retries = retries
        self._concurrency = concurrency

    async def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Set `reward` and `reward_parts` of each valid trajectory, or make it invalid with the reason
        `reward <part>: <what went wrong>`. Invalid ones are left as they are."""
        gate = asyncio.Semaphore(self._concurrency)
        gates = {part.name: asyncio.Semaphore(part.max_calls) for part in self._parts}
        async with asyncio.TaskGroup() as tasks:
            for trajectory in trajectories:
                if trajectory.is_valid:
                    tasks.create_task(self._score(trajectory, gate, gates))

    async def _score(
        self, trajectory: Trajectory, gate: asyncio.Semaphore, gates: dict[str, asyncio.Semaphore]
    ) -> None:
        scores: dict[str, float] = {}
        for part in self._parts:
            try:
                scores[part.name] = await self._call(part, trajectory, gates[part.name], gate)
            except RewardError as error:
                trajectory.invalidate(f"reward {part.name}: {error}")
                return
        from_env = env_reward(trajectory)
        reward = from_env + sum(part.weight * scores[part.name] for part in self._parts)
        if not math.isfinite(reward):
            trajectory.invalidate(f"reward sum: {reward}, of {scores} and {from_env} from the environment")
            return
        trajectory.reward_parts, trajectory.reward = scores, reward

    async def _call(
        self, part: _Weighted, trajectory: Trajectory, of_part: asyncio.Semaphore, of_all: asyncio.Semaphore
    ) -> float:
        """The part's score. A failed try is repeated as often as configured; the last one's RewardError is raised."""
        for _ in range(self._retries):
            try:
                return await self._try(part, trajectory, of_part, of_all)
            except RewardError:
                logger.debug(
                    "reward %s of %s failed, trying again", part.name, trajectory.prompt.uid, exc_info=True
                )
        return await self._try(part, trajectory, of_part, of_all)

    async def _try(
        self, part: _Weighted, trajectory: Trajectory, of_part: asyncio.Semaphore, of_all: asyncio.Semaphore
    ) -> float:
        score = part.part(trajectory)
        if not callable(score):
            return as_score(score)
        async with of_part, of_all:
            return as_score(await score())

    def close(self) -> None:
        """End threads and processes. Calls that hang end with the process."""
        for part in self._parts:
            part.part.close()


def env_reward(trajectory: Trajectory) -> float:
    """What the environment gave over the whole episode."""
    if trajectory.env_steps is not None:
        return float(trajectory.env_steps.rewards.sum())
    return sum(turn.reward for turn in trajectory.turns)


def as_score(value: object) -> float:
    """A part's value as a finite number: numbers, booleans and scalars of numpy or torch. Else RewardError."""
    if not hasattr(value, "__float__") or getattr(value, "ndim", 0):
        raise RewardError(f"returned {value!r} ({type(value).__name__}), not a number")
    try:
        score = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"returned {value!r} ({type(value).__name__}): {error}") from error
    if not math.isfinite(score):
        raise RewardError(f"returned {score}, not a finite number")
    return score
