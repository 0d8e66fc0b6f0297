"""Run components and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from braid.algorithms.rewards import RunningMoments
from braid.checkpoint.store import CheckpointStore
from braid.config.schema import RunConfig
from braid.data.sampler import PromptSampler
from braid.plan import Plan
from braid.report.metrics import Metrics
from braid.report.reporter import Reporter
from braid.runtime.interrupts import StopSignals
from braid.runtime.memory_record import MemoryRecorder
from braid.training.group import GroupBackend
from braid.types import Prompt

from .data_plane import DataPlane
from .rollouts import Rollouts
from .supervised import Supervised
from .watch import LearningWatch


@dataclass(slots=True)
class Progress:
    """How far the run has come; saved with every checkpoint.

    `round` counts rollout rounds and `step` optimizer steps of the policy in them. `is_reported` is false between the update of
    a round and its line in the metrics, while the policy is evaluated. `warm_steps` counts optimizer steps of the warm-up, and
    `is_warm` says that it is over.
    `reference_updates` counts how often the reference has taken over the policy's weights, `empty_rounds` the rounds in a row
    that had nothing to train on. `kl_coef` is the KL coefficient that steering came to; None before it has moved.
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
"""Saving by time takes at most this share of it ..."""
_LEAST_S = 10.0
"""... and comes no oftener than this."""


@dataclass(slots=True)
class SaveClock:
    """When a checkpoint is due by time. `cost_s` is what the last one took."""

    at_s: float = field(default_factory=time.monotonic)
    cost_s: float = 0.0

    def is_due(self, every_s: float) -> bool:
        """Whether `every_s` have passed since the last one, or a shorter time in which saving is cheap."""
        wait_s = min(every_s, max(_LEAST_S, self.cost_s / _SAVED_SHARE))
        return every_s > 0 and time.monotonic() - self.at_s >= wait_s

    def saved(self, cost_s: float) -> None:
        """A checkpoint was written."""
        self.at_s, self.cost_s = time.monotonic(), cost_s


@dataclass(slots=True)
class Parts:
    """Everything that the verbs of steps.py work on. Built by build.py; lives as long as the run.

    `follow_policy` makes the reference and the critic's backbone copies of the policy as it is now, where the config
    gives them no weights of their own; `update_reference` makes the reference one in any case. `export` writes the policy as a
    Hugging Face folder; None for policies that have no such form. `check_weights` compares the engine's weights with the
    trainer's, given the version that was published; None when that is not asked for. `reward_moments` are those of all rounds so
    far, where rewards are normalised by them. `inference` computes the policy's log-probs before the update, where it has devices
    of its own for that. `leave` is called last, when all workers have ended. `about` is what a checkpoint says of the run: its
    id, and its config as text. `saved` is the progress in the newest checkpoint that this run wrote or was restored from,
    `update_s` what the last round took after its sampling.
    """

    config: RunConfig
    plan: Plan
    reporter: Reporter
    store: CheckpointStore
    sampler: PromptSampler
    eval_prompts: Mapping[str, Sequence[Prompt]]
    rollouts: Rollouts
    data: DataPlane
    policy: GroupBackend
    critic: GroupBackend | None
    reference: GroupBackend | None
    supervised: Supervised | None
    follow_policy: Callable[[], None]
    update_reference: Callable[[], None]
    inference: GroupBackend | None = None
    leave: Callable[[], None] = lambda: None
    export: Callable[[Path], None] | None = None
    check_weights: Callable[[int], None] | None = None
    progress: Progress = field(default_factory=Progress)
    metrics: Metrics = field(default_factory=Metrics)
    memory: MemoryRecorder | None = None
    reward_moments: RunningMoments = field(default_factory=RunningMoments)
    about: Mapping[str, str] = field(default_factory=dict)
    stop: StopSignals = field(default_factory=StopSignals)
    clock: SaveClock = field(default_factory=SaveClock)
    saved: dict[str, Any] = field(default_factory=dict)
    update_s: float | None = None
    watch: LearningWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = LearningWatch(self.config, self.plan)

    @property
    def backends(self) -> dict[str, GroupBackend]:
        """The models of the training roles, by role."""
        roles = {
            "policy": self.policy,
            "critic": self.critic,
            "reference": self.reference,
            "inference": self.inference,
        }
        return {role: backend for role, backend in roles.items() if backend is not None}

    @property
    def kl_coef(self) -> float:
        """The KL coefficient of this round."""
        steered = self.progress.kl_coef
        return self.plan.recipe.kl_coef if steered is None else steered

    def is_due(self, every: int, is_end: bool = False) -> bool:
        """Whether this round is one of each `every` (0 for none), or the end that counts anyway."""
        return is_end or (every > 0 and self.progress.round % every == 0)

    def close(self) -> None:
        """End what runs beside the loop: workers with their engines, environments and reward processes."""
        self.rollouts.close()
        self.data.close()
        self.leave()
