"""Rewards of trajectories: the weighted sum of the configured parts, plus the environment's rewards.

Owns weights, sources, retries, concurrency limits and failure handling: a trajectory that cannot be scored
becomes invalid, with the part and the reason, and is never scored 0. The parts are built in parts.py.
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

from braid.config.data import covers
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
    """A named, weighted part that scores the trajectories of `sources` (see config.data.covers).

    At most `max_calls` of its calls are in flight at a time; with `is_shared` they also count toward the
    limit shared by all parts.
    """

    name: str
    weight: float
    sources: frozenset[str]
    named: frozenset[str]
    """Sources that any part names."""
    part: Part | ModelPart
    retries: int
    max_calls: int
    is_shared: bool = True

    def covers(self, trajectory: Trajectory) -> bool:
        return covers(self.sources, self.named, trajectory.prompt.source)


def build_scorer(
    config: RewardConfig, *, base_dir: Path, seed: int = 0, services: Services = NO_SERVICES
) -> Scorer:
    """Build the scorer for `config`. Paths of function files are relative to `base_dir` (the config's
    folder).

    `seed` is the run's seed, used for the jitter of retry delays. Raises ConfigError for duplicate part names
    and for the errors of parts.build_part.
    """
    setting = Setting(config.timeout_s, config.concurrency, base_dir, seed, services, config.code.isolation)
    named = frozenset(source for part in config.parts for source in part.sources)
    parts: list[_Weighted] = []
    for i, part in enumerate(config.parts):
        name = part_name(part)
        if any(name == other.name for other in parts):
            problem = f"another part is also named {name!r}; choose another name"
            raise ConfigError([Problem(f"reward.parts[{i}].name", problem, "config")])
        built = build_part(part, i, setting)
        sources = frozenset(part.sources)
        parts.append(_Weighted(name, part.weight, sources, named, built, *_limits(part, config)))
    return Scorer(parts, concurrency=config.concurrency)


def part_name(part: RewardPart) -> str:
    """Name of a part in metrics: its configured name, else the name of its function or its kind."""
    if isinstance(part, FunctionReward) and not part.name:
        return re.split(r"[.:]", part.path)[-1] or part.kind
    return part.name or part.kind


def _limits(part: RewardPart, config: RewardConfig) -> tuple[int, int, bool]:
    """(retries, max_calls, is_shared) of a part. A greedy policy as judge is not retried, as its reply would
    be the same."""
    match part:
        case JudgeReward():
            is_certain = part.url == "policy" and part.temperature == 0
            return 0 if is_certain else part.retries, part.concurrency or config.concurrency, False
        case MathReward() | ReasoningGymReward() | CodeReward():
            return config.retries, min(config.concurrency, os.cpu_count() or 1), True
        case _:
            return config.retries, config.concurrency, True


class Scorer:
    """Scores trajectories in place. Built by `build_scorer`; `close` stops its threads and processes."""

    def __init__(self, parts: Sequence[_Weighted], *, concurrency: int) -> None:
        self._parts = tuple(parts)
        self._limits = _Limits(concurrency)

    async def score(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Set `reward` and `reward_parts` of each valid trajectory, or invalidate it with the reason
        `reward <part>: <error>`. Trajectories that are already invalid are skipped. May be called while other
        calls run; the limits on concurrent calls hold for all together.

        Returns metrics of the parts: time per call, retries, truncated inputs.
        """
        valid = [t for t in trajectories if t.is_valid]
        scoring = _Scoring(self._limits)
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
            trajectory.invalidate(f"reward sum: {reward}, from {scores} and {from_env} of the environment")
            return
        trajectory.reward_parts, trajectory.reward = scores, reward

    def close(self) -> None:
        """Stop threads and processes. Calls that hang end with the process."""
        for part in self._parts:
            part.part.close()


class _Limits:
    """Limits on concurrent calls: of all parts together, and of each."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._of: dict[str, asyncio.Semaphore] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def all(self) -> asyncio.Semaphore:
        return self._limit("", self._concurrency)

    def part(self, part: _Weighted) -> asyncio.Semaphore:
        return self._limit(part.name, part.max_calls)

    def _limit(self, name: str, size: int) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a semaphore belongs to one loop
            self._loop, self._of = loop, {}
        return self._of.setdefault(name, asyncio.Semaphore(size))


class _Scoring:
    """State of one call of `Scorer.score`: running batches, and metrics."""

    def __init__(self, limits: _Limits) -> None:
        self.metrics = Metrics()
        self.batches: dict[str, asyncio.Task[dict[int, float | RewardError]]] = {}
        self._limits = limits

    async def batch(
        self, part: _Weighted, model: ModelPart, trajectories: Sequence[Trajectory]
    ) -> dict[int, float | RewardError]:
        """Score `trajectories` with a reward model. Returns scores by the trajectory's `id()`."""
        if not trajectories:
            return {}
        start = time.perf_counter()
        found = await model.score_all(trajectories)
        self.metrics.mean(f"reward/time/{part.name}_s", time.perf_counter() - start, len(trajectories))
        self.metrics.add(f"reward/truncated/{part.name}", found.num_truncated)
        return {id(t): score for t, score in zip(trajectories, found.scores, strict=True)}

    async def one(self, part: _Weighted, trajectory: Trajectory) -> float:
        """The part's score of a trajectory. Raises RewardError if it cannot be scored."""
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
        """Score of the call, retried on failure as configured. Raises the RewardError of the last attempt."""
        self.metrics.add(f"reward/retries/{part.name}", 0)
        for _ in range(part.retries):
            try:
                return await self._try(part, call)
            except RewardError as error:
                if error.is_final:
                    raise
                logger.debug("reward %s of %s failed, retrying: %s", part.name, uid, error)
                self.metrics.add(f"reward/retries/{part.name}", 1)
                await asyncio.sleep(error.wait_s)
        return await self._try(part, call)

    async def _try(self, part: _Weighted, call: Later) -> float:
        async with self._limits.part(part), self._limits.all() if part.is_shared else nullcontext():
            start = time.perf_counter()
            score = as_score(await call())
        self.metrics.mean(f"reward/time/{part.name}_s", time.perf_counter() - start)
        return score


def env_reward(trajectory: Trajectory) -> float:
    """Sum of the environment's rewards over the episode."""
    if trajectory.env_steps is not None:
        return float(trajectory.env_steps.rewards.sum())
    return sum(turn.reward for turn in trajectory.turns)


def as_score(value: object) -> float:
    """Convert a part's value (a number, boolean, or NumPy or torch scalar) to a float. Raises RewardError for
    other types and for values that are not finite."""
    if not hasattr(value, "__float__") or getattr(value, "ndim", 0):
        raise RewardError(f"returned {value!r} ({type(value).__name__}), not a number")
    try:
        score = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"returned {value!r} ({type(value).__name__}): {error}") from error
    if not math.isfinite(score):
        raise RewardError(f"returned {score}, not a finite number")
    return score
