"""Rewards of trajectories: the weighted sum of the config's parts, plus what the environment gave.

Owns weights, sources, retries, limits on calls in flight, and what a failure means: the trajectory becomes invalid, with the
part and the reason. It is never scored 0. What each part computes is parts.py's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from braid.config.reward import (
    CodeReward,
    FunctionReward,
    JudgeReward,
    MathReward,
    ReasoningGymReward,
    RewardConfig,
    RewardPart,
)
from braid.errors import ConfigError, Problem, RewardError
from braid.report.metrics import Metrics
from braid.types import Trajectory

from .base import NO_SERVICES, Later, Part, Services
from .classifier import ModelPart
from .parts import Setting, build_part

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Weighted:
    """A part under its name, and the trajectories that it scores: those of `sources`, or all.

    At most `max_calls` of its calls are in flight together; with `is_shared` they count among those of all parts.
    """

    name: str
    weight: float
    sources: frozenset[str]
    part: Part | ModelPart
    retries: int
    max_calls: int
    is_shared: bool = True

    def covers(self, trajectory: Trajectory) -> bool:
        return not self.sources or trajectory.prompt.source in self.sources


def build_scorer(
    config: RewardConfig, *, base_dir: Path, seed: int = 0, services: Services = NO_SERVICES
) -> Scorer:
    """The scorer that `config` describes; files of functions are looked up from `base_dir` (the config's folder).

    `seed` is that of the run, for waits between tries. Raises ConfigError for equal names of parts, for what parts.py
    refuses, and for parts whose service is not among `services`.
    """
    setting = Setting(config.timeout_s, config.concurrency, base_dir, seed, services, config.code.isolation)
    parts: list[_Weighted] = []
    for i, part in enumerate(config.parts):
        name = part_name(part)
        if any(name == other.name for other in parts):
            problem = f"another part is named {name!r} already; give this one its own"
            raise ConfigError([Problem(f"reward.parts[{i}].name", problem, "config")])
        built = build_part(part, i, setting)
        parts.append(_Weighted(name, part.weight, frozenset(part.sources), built, *_limits(part, config)))
    return Scorer(parts, concurrency=config.concurrency)


def part_name(part: RewardPart) -> str:
    """What metrics call a part: its own name, else that of its function or its kind."""
    if isinstance(part, FunctionReward) and not part.name:
        return re.split(r"[.:]", part.path)[-1] or part.kind
    return part.name or part.kind


def _limits(part: RewardPart, config: RewardConfig) -> tuple[int, int, bool]:
    """(retries, max_calls, is_shared) of a part. A policy that takes the likeliest token would judge the same way again."""
    match part:
        case JudgeReward():
            is_certain = part.url == "policy" and part.temperature == 0
            return 0 if is_certain else part.retries, part.concurrency or config.concurrency, False
        case MathReward() | ReasoningGymReward() | CodeReward():
            return config.retries, min(config.concurrency, os.cpu_count() or 1), True
        case _:
            return config.retries, config.concurrency, True


class Scorer:
    """Scores trajectories in place. Built by `build_scorer`; `close` ends its threads and processes."""

    def __init__(self, parts: Sequence[_Weighted], *, concurrency: int) -> None:
        self._parts = tuple(parts)
        self._concurrency = concurrency

    async def score(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Set `reward` and `reward_parts` of each valid trajectory, or make it invalid with the reason
        `reward <part>: <what went wrong>`. Invalid ones are left as they are.

        Returns what the parts cost: time of a call, further tries, inputs cut.
        """
        valid = [t for t in trajectories if t.is_valid]
        scoring = _Scoring(self._concurrency)
        async with asyncio.TaskGroup() as tasks:
            for part in self._parts:
                if isinstance(part.part, ModelPart):
                    covered = [t for t in valid if part.covers(t)]
                    scoring.batches[part.name] = tasks.create_task(scoring.batch(part, part.part, covered))
            for trajectory in valid:
                tasks.create_task(self._score(trajectory, scoring))
        return scoring.metrics

    async def _score(self, trajectory: Trajectory, scoring: _Scoring) -> None:
        parts = [part for part in self._parts if part.covers(trajectory)]
        if self._parts and not parts:
            trajectory.invalidate(f"reward: no part scores the source {trajectory.prompt.source!r}")
            return
        scores: dict[str, float] = {}
        for part in parts:
            try:
                scores[part.name] = await scoring.one(part, trajectory)
            except RewardError as error:
                trajectory.invalidate(f"reward {part.name}: {error}")
                return
        from_env = env_reward(trajectory)
        reward = from_env + sum(part.weight * scores[part.name] for part in parts)
        if not math.isfinite(reward):
            trajectory.invalidate(f"reward sum: {reward}, of {scores} and {from_env} from the environment")
            return
        trajectory.reward_parts, trajectory.reward = scores, reward

    def close(self) -> None:
        """End threads and processes. Calls that hang end with the process."""
        for part in self._parts:
            part.part.close()


class _Scoring:
    """One call of `Scorer.score`: its limits, its batches on their way, and what it cost."""

    def __init__(self, concurrency: int) -> None:
        self.metrics = Metrics()
        self.batches: dict[str, asyncio.Task[dict[int, float | RewardError]]] = {}
        self._of_all = asyncio.Semaphore(concurrency)
        self._of_part: dict[str, asyncio.Semaphore] = {}

    async def batch(
        self, part: _Weighted, model: ModelPart, trajectories: Sequence[Trajectory]
    ) -> dict[int, float | RewardError]:
        """Scores by identity of the trajectory."""
        if not trajectories:
            return {}
        start = time.perf_counter()
        found = await model.score_all(trajectories)
        self.metrics.mean(f"reward/time/{part.name}_s", time.perf_counter() - start, len(trajectories))
        self.metrics.add(f"reward/truncated/{part.name}", found.num_truncated)
        return {id(t): score for t, score in zip(trajectories, found.scores, strict=True)}

    async def one(self, part: _Weighted, trajectory: Trajectory) -> float:
        """The part's score of a trajectory. Raises RewardError when there is none."""
        if isinstance(part.part, ModelPart):
            score = (await self.batches[part.name])[id(trajectory)]
            if isinstance(score, RewardError):
                raise score
            return as_score(score)
        score = part.part(trajectory)
        if isinstance(score, int | float):
            return as_score(score)
        return await self._called(part, score, trajectory.prompt.uid)

    async def _called(self, part: _Weighted, call: Later, uid: str) -> float:
        """The call's score. A failed try is repeated as often as configured; the last one's RewardError is raised."""
        self.metrics.add(f"reward/retries/{part.name}", 0)
        for _ in range(part.retries):
            try:
                return await self._try(part, call)
            except RewardError as error:
                if error.is_final:
                    raise
                logger.debug("reward %s of %s failed, trying again: %s", part.name, uid, error)
                self.metrics.add(f"reward/retries/{part.name}", 1)
                await asyncio.sleep(error.wait_s)
        return await self._try(part, call)

    async def _try(self, part: _Weighted, call: Later) -> float:
        of_part = self._of_part.setdefault(part.name, asyncio.Semaphore(part.max_calls))
        async with of_part, self._of_all if part.is_shared else nullcontext():
            start = time.perf_counter()
            score = as_score(await call())
        self.metrics.mean(f"reward/time/{part.name}_s", time.perf_counter() - start)
        return score


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
