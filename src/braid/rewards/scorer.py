"""Rewards of trajectories: the weighted sum of the configured parts, plus the environment's rewards.

Owns weights, sources, retries, concurrency limits and failure handling: a trajectory that cannot be scored
becomes invalid, with the part and the reason, and is never scored 0. The parts are built in parts.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from braid.config.data import covers
from braid.config.reward import RewardConfig
from braid.errors import ConfigError, Problem, RewardError
from braid.report.metrics import Metrics
from braid.types import Trajectory, exact_sum
from braid.users import finite_number

from .base import Part, Services
from .classifier import ModelPart
from .parts import GroupPart, build_part

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Weighted:
    """A named, weighted part that scores the trajectories of `sources` (see config.data.covers).

    At most `max_calls` of its calls are in flight at a time; with `is_shared` they also count toward the
    limit shared by all parts.
    """

    name: str
    weight: float
    sources: frozenset[str]
    part: Part | ModelPart | GroupPart
    retries: int
    max_calls: int
    is_shared: bool = True


def build_scorer(
    config: RewardConfig, *, base_dir: Path, seed: int = 0, services: Services | None = None
) -> Scorer:
    """Build the scorer for `config`. Paths of function files are relative to `base_dir` (the config's
    folder).

    `seed` is the run's seed, used for the jitter of retry delays. Raises ConfigError for duplicate part names
    and for the errors of build_part.
    """
    parts: list[_Weighted] = []
    for i, part in enumerate(config.parts):
        name = part.metric_name
        if any(name == other.name for other in parts):
            problem = f"another part is also named {name!r}; choose another name"
            raise ConfigError([Problem(f"reward.parts[{i}].name", problem, "config")])
        built = build_part(config, i, base_dir=base_dir, seed=seed, services=services or Services({}))
        retries, max_calls = part.limits(config)
        is_shared = not part.has_own_limits
        parts.append(
            _Weighted(name, part.weight, frozenset(part.sources), built, retries, max_calls, is_shared)
        )
    return Scorer(parts, concurrency=config.concurrency)


Batch = asyncio.Task[Mapping[int, object]]
"""Running batches of a reward model or of a function of groups: scores by the trajectory's `id()`."""


class Scorer:
    """Scores trajectories in place. Built by `build_scorer`; `close` stops its threads and processes."""

    def __init__(self, parts: Sequence[_Weighted], *, concurrency: int) -> None:
        self._parts = tuple(parts)
        self._named = frozenset(source for part in parts for source in part.sources)
        self._concurrency = concurrency
        self._limits: dict[str, asyncio.Semaphore] = {}
        """Limits on concurrent calls: by the part's name, and "" for all parts together."""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Set `reward` and `reward_parts` of each valid trajectory, or invalidate it with the reason
        `reward <part>: <error>`. Trajectories that are already invalid are skipped. May be called while other
        calls run; the limits on concurrent calls hold for all together.

        Returns metrics of the parts: time per call, retries, truncated inputs.
        """
        if self._loop is not (loop := asyncio.get_running_loop()):  # a semaphore belongs to one loop
            self._loop = loop
            self._limits = {part.name: asyncio.Semaphore(part.max_calls) for part in self._parts}
            self._limits[""] = asyncio.Semaphore(self._concurrency)
        valid, metrics = [t for t in trajectories if t.is_valid], Metrics()
        async with asyncio.TaskGroup() as tasks:
            batches: dict[str, Batch] = {}
            for part in self._parts:
                covered = [t for t in valid if self._covers(part, t)]
                if isinstance(part.part, ModelPart):
                    batches[part.name] = tasks.create_task(_batch(part.name, part.part, covered, metrics))
                elif isinstance(part.part, GroupPart):
                    batches[part.name] = tasks.create_task(self._group(part, part.part, covered, metrics))
            for trajectory in valid:
                tasks.create_task(self._score(trajectory, batches, metrics))
        return metrics

    def _covers(self, part: _Weighted, trajectory: Trajectory) -> bool:
        return covers(part.sources, self._named, trajectory.prompt.source)

    async def _score(self, trajectory: Trajectory, batches: Mapping[str, Batch], metrics: Metrics) -> None:
        parts = [part for part in self._parts if self._covers(part, trajectory)]
        if self._parts and not parts:
            trajectory.invalidate(f"reward: no part scores the source {trajectory.prompt.source!r}")
            return
        scores: dict[str, float] = {}
        for part in parts:
            try:
                if part.name in batches:
                    score = (await batches[part.name])[id(trajectory)]
                    if isinstance(score, RewardError):
                        raise score
                    scores[part.name] = as_score(score)
                else:
                    scores[part.name] = await self._called(part, trajectory, metrics)
            except RewardError as error:
                trajectory.invalidate(f"reward {part.name}: {error}")
                return
        from_env = env_rewards(trajectory)
        reward = exact_sum([*from_env, *(part.weight * scores[part.name] for part in parts)])
        if not math.isfinite(reward):
            trajectory.invalidate(
                f"reward sum: {reward}, from {scores} and {exact_sum(from_env)} of the environment"
            )
            return
        trajectory.reward_parts, trajectory.reward = scores, reward

    async def _called(self, part: _Weighted, trajectory: Trajectory, metrics: Metrics) -> float:
        """The part's score of a trajectory. Raises the RewardError of the last attempt."""
        assert isinstance(part.part, Part)
        call = part.part.score(trajectory)
        if isinstance(call, int | float):
            return as_score(call)

        async def scored() -> float:
            return as_score(await call())

        return await self._retried(part, scored, metrics)

    async def _group(
        self, part: _Weighted, function: GroupPart, trajectories: Sequence[Trajectory], metrics: Metrics
    ) -> Mapping[int, object]:
        """Score `trajectories` with a function of groups."""
        if not trajectories:
            return {}
        try:
            scores = await self._retried(part, partial(function.scores, trajectories), metrics)
        except RewardError as error:
            return {id(t): error for t in trajectories}
        return {id(t): score for t, score in zip(trajectories, scores, strict=True)}

    async def _retried(self, part: _Weighted, call: Callable[[], Awaitable[T]], metrics: Metrics) -> T:
        """The result of a part's call within its limits, after as many retries as are configured."""
        metrics.add(f"reward/retries/{part.name}", 0)
        attempts = 0
        while True:
            try:
                async with self._limits[part.name], self._limits[""] if part.is_shared else nullcontext():
                    start = time.perf_counter()
                    score = await call()
            except RewardError as error:
                if error.is_final or attempts == part.retries:
                    raise
                attempts += 1
                logger.debug("reward %s failed, retrying: %s", part.name, error)
                metrics.add(f"reward/retries/{part.name}", 1)
                await asyncio.sleep(error.wait_s)
            else:
                metrics.mean(f"reward/time/{part.name}_s", time.perf_counter() - start)
                return score

    def close(self) -> None:
        """Stop threads and processes. Calls that hang end with the process."""
        for part in self._parts:
            part.part.close()


async def _batch(
    name: str, model: ModelPart, trajectories: Sequence[Trajectory], metrics: Metrics
) -> Mapping[int, object]:
    """Score `trajectories` with a reward model."""
    if not trajectories:
        return {}
    start = time.perf_counter()
    scores, num_truncated = await model.score_all(trajectories)
    metrics.mean(f"reward/time/{name}_s", time.perf_counter() - start, len(trajectories))
    metrics.add(f"reward/truncated/{name}", num_truncated)
    return {id(t): score for t, score in zip(trajectories, scores, strict=True)}


def env_rewards(trajectory: Trajectory) -> list[float]:
    """The environment's rewards of the episode."""
    if trajectory.env_steps is not None:
        return trajectory.env_steps.rewards.ravel().tolist()
    return [turn.reward for turn in trajectory.turns]


def as_score(value: object) -> float:
    """Convert a part's value (a number, boolean, or NumPy or torch scalar) to a float. Raises RewardError for
    other types and for values that are not finite."""
    try:
        return finite_number(value, "returned")
    except ValueError as error:
        raise RewardError(str(error)) from error
