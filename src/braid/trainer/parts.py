"""Run components and progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from braid.algorithms.rewards import RunningMoments
from braid.checkpoint.store import CheckpointStore
from braid.cluster.interrupts import StopSignals
from braid.cluster.memory_record import MemoryRecorder
from braid.config.schema import RunConfig
from braid.data.sampler import PromptSampler
from braid.plan import Plan
from braid.report.metrics import Metrics
from braid.report.reporter import Reporter
from braid.training.group import ModelGroup
from braid.types import Prompt

from .buffer import Buffer
from .cluster import Cluster
from .pipeline import Pipeline
from .rollouts import Rollouts
from .supervised import Supervised
from .watch import LearningWatch


@dataclass(slots=True)
class Progress:
    """Counters of the run; saved with every checkpoint.

    `round` counts rollout rounds and `step` the policy's optimizer steps in them. `is_reported` is false
    between the update of a round and its metrics line, while the policy is evaluated. `warm_steps` counts
    optimizer steps of the warm-up, and `is_warm` is true once it is complete. `reference_updates` counts how
    often the policy's weights were copied to the reference, `empty_rounds` the consecutive rounds without
    anything to train on. `kl_coef` is the adaptive KL coefficient; None until it has been adapted.
    """

    round: int = 0
    step: int = 0
    is_reported: bool = True
    warm_steps: int = 0
    is_warm: bool = False
    reference_updates: int = 0
    empty_rounds: int = 0
    kl_coef: float | None = None

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def load(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


_SAVED_SHARE = 0.02
"""Largest share of wall-clock time that time-based saving may take."""
_LEAST_S = 10.0
"""Shortest time between two time-based saves, in seconds."""


@dataclass(slots=True)
class SaveClock:
    """Decides when a checkpoint is due by time. `cost_s` is the duration of the last save."""

    at_s: float = field(default_factory=time.monotonic)
    cost_s: float = 0.0

    def is_due(self, every_s: float) -> bool:
        """Whether `every_s` seconds have passed since the last save, or a shorter time if saving is cheap."""
        wait_s = min(every_s, max(_LEAST_S, self.cost_s / _SAVED_SHARE))
        return every_s > 0 and time.monotonic() - self.at_s >= wait_s

    def saved(self, cost_s: float) -> None:
        """Record that a checkpoint was written."""
        self.at_s, self.cost_s = time.monotonic(), cost_s


@dataclass(slots=True)
class Parts:
    """Everything that the stages operate on. Built by build.py; lives as long as the run.

    `reward_moments` are those of all rounds so far, if rewards are normalised by them. `inference` computes
    the policy's log-probs before the update, if it has separate devices for that. `about` is stored in checkpoints: the run's id, and its config as text.
    `saved` is the progress in the newest checkpoint that this run wrote or was restored from, `update_s` the
    time that the last round took after its rollout. `pipeline` decides on the order of the pipelined loop.
    `warned_invalid`: share of the trajectories that a reason had made invalid when it was last warned of.
    """

    config: RunConfig
    plan: Plan
    reporter: Reporter
    store: CheckpointStore
    cluster: Cluster
    sampler: PromptSampler
    eval_prompts: Mapping[str, Sequence[Prompt]]
    rollouts: Rollouts
    buffer: Buffer
    policy: ModelGroup
    critic: ModelGroup | None
    reference: ModelGroup | None
    inference: ModelGroup | None
    supervised: Supervised | None
    tokenizer: PreTrainedTokenizerBase | None
    about: Mapping[str, str]
    progress: Progress = field(default_factory=Progress)
    metrics: Metrics = field(default_factory=Metrics)
    memory: MemoryRecorder | None = None
    reward_moments: RunningMoments = field(default_factory=RunningMoments)
    stop: StopSignals = field(default_factory=StopSignals)
    clock: SaveClock = field(default_factory=SaveClock)
    saved: dict[str, Any] = field(default_factory=dict)
    update_s: float | None = None
    pipeline: Pipeline | None = None
    warned_invalid: dict[str, float] = field(default_factory=dict)
    watch: LearningWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = LearningWatch(self.config, self.plan)

    @property
    def models(self) -> dict[str, ModelGroup]:
        """The models of the training roles, by role."""
        roles = {
            "policy": self.policy,
            "critic": self.critic,
            "reference": self.reference,
            "inference": self.inference,
        }
        return {role: model for role, model in roles.items() if model is not None}

    @property
    def kl_coef(self) -> float:
        """The KL coefficient of this round."""
        steered = self.progress.kl_coef
        return self.plan.recipe.kl_coef if steered is None else steered

    def is_due(self, every: int, is_end: bool = False) -> bool:
        """Whether this round is a multiple of `every` (0 for never), or `is_end`."""
        return is_end or (every > 0 and self.progress.round % every == 0)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Record the duration of a stage of the round, and its memory if asked to."""
        start = time.perf_counter()
        with self.reporter.phase(stage), self.memory.phase(stage) if self.memory else nullcontext():
            yield
        self.metrics.add(f"time/{stage}_s", time.perf_counter() - start)

    def close(self) -> None:
        """Stop the workers with their engines, environments and reward processes."""
        self.rollouts.close()
        self.cluster.leave()
