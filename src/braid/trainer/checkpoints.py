"""What is in a run's checkpoints, beside its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from braid.checkpoint.store import CheckpointStore

from .models import Models


class Stateful(Protocol):
    """Something whose small state is stored in checkpoints."""

    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Writes and restores the models, and the `others` by name of their entry: sampler, reward_moments,
    checks, and of a pipelined run pipeline. `about` is stored too: the run's id, and its config as text.
    `large` are others that, as models do, change only in updates and are read when a checkpoint is written:
    sac."""

    store: CheckpointStore
    models: Models
    others: Mapping[str, Stateful]
    about: Mapping[str, str]
    large: Mapping[str, Stateful] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """A copy of the state that is small: all but the models and `large`."""
        warm_up = self.models.warm_up
        return {
            "warm_up_sampler": None if warm_up is None else warm_up.sampler.state(),
            "about": dict(self.about),
        } | {name: other.state() for name, other in self.others.items()}

    def write(self, state: Mapping[str, Any], best: int | None = None) -> None:
        """Write a checkpoint of the models and of `state`, which matches them. That of the step `best` is
        kept beside the newest."""
        state = {**state, **{name: other.state() for name, other in self.large.items()}}
        self.store.save(state["progress"]["step"], partial(self.models.write, state), best=best)

    def restore(self, state: Mapping[str, Any], folder: Path, *, is_warm: bool) -> None:
        """Restore everything from the checkpoint in `folder`; `is_warm` if its warm-up is complete."""
        self.models.restore(state, folder, is_warm=is_warm)
        if self.models.warm_up is not None:
            self.models.warm_up.sampler.load(state["warm_up_sampler"])
        for name, other in {**self.others, **self.large}.items():
            if name in state:  # the on-policy loop has no pipeline
                other.load(state[name])
