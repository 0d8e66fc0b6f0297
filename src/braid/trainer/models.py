"""The models of a run and the engines that sample from them: weights between them, memory, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from braid.config.schema import RunConfig
from braid.report.metrics import Metrics
from braid.rollout.collector import Collector
from braid.rollout.engine import NewWeights
from braid.training.backend import TrainingBackend
from braid.training.group import ModelGroup

from .rollouts import Rollouts
from .supervised import Supervised

Export = Callable[[Path], None]
"""Writes the policy as a Hugging Face folder."""


class Models:
    """The models of the training roles, and the rollout workers. On workers, weights pass by reference, past
    the driver.

    `inference` computes the policy's log-probs before the update, if it has separate devices for that.
    `warm_up` is the supervised warm-up before the first round; None once it is complete. `export` is None for
    models that are not exported.
    """

    def __init__(
        self,
        config: RunConfig,
        by_role: Mapping[str, ModelGroup],
        rollouts: Rollouts,
        warm_up: Supervised | None,
        export: Export | None,
    ) -> None:
        self.by_role, self.rollouts, self.warm_up, self.export = by_role, rollouts, warm_up, export
        self.policy = by_role["policy"]
        self.critic = by_role.get("critic")
        self.reference = by_role.get("reference")
        """The only one; None with teachers."""
        self.teachers = [
            (by_role[f"reference_{i}"], frozenset(teacher.sources))
            for i, teacher in enumerate(config.reference.teachers)
            if f"reference_{i}" in by_role
        ]
        """References of the rows of some sources."""
        self.inference = by_role.get("inference")
        self._config = config

    def follow_warm_up(self) -> None:
        """Copy the weights of the supervised warm-up to the policy, the reference and the critic, unless the
        config gives those separate weights, and drop it. Without a warm-up all start from the same
        weights."""
        if self.warm_up is None:
            return
        config, trained = self._config, self.warm_up.model
        _copy(trained, self.policy)
        if self.reference is not None and config.reference.path is None:
            _copy(trained, self.reference)
        if self.critic is not None and config.critic.path is None:
            merged = config.model.lora is not None and not config.model.kind.adapts_critic
            _copy(trained, self.critic, merged=merged, heads_differ=True)
        trained.ranks.close()
        self.warm_up = None

    def drop_reference(self) -> None:
        """Release the reference, which is no longer needed."""
        if self.reference is not None:
            self.reference.ranks.close()
            self.by_role = {role: model for role, model in self.by_role.items() if role != "reference"}
            self.reference = None

    def update_reference(self, epoch: int, num_updates: int) -> int:
        """Copy the policy's weights to the reference every reference.update_every_epochs passes over the
        prompts: merged if it was loaded from a separate folder and so has no adapters. `num_updates` were
        made before; returns the new number."""
        every = self._config.reference.update_every_epochs
        if not every or epoch // every <= num_updates:
            return num_updates
        if self.reference is not None:
            merged = self._config.model.lora is not None and self._config.reference.path is not None
            _copy(self.policy, self.reference, merged=merged)
        return epoch // every

    def sync_weights(self, version: int, when: NewWeights = "drain") -> None:
        """Sync the policy's weights to the engines as `version`, `when` as in Engine.set_weights, and to the
        role that computes its log-probs on separate devices, if there is one."""
        self.rollouts.set_weights(version, when)
        if self.inference is not None:
            _copy(self.policy, self.inference)

    def start_sampling(self) -> None:
        """Until `end_sampling`, keep in host memory what train.offload names; at all other times engines that
        share devices with models sleep."""
        for model in self.by_role.values():
            model.ranks.call(TrainingBackend.to_host)
        self.rollouts.wake()

    def end_sampling(self) -> None:
        """Undo `start_sampling`. Not called after an error: the run ends or is built again."""
        self.rollouts.sleep()
        for model in self.by_role.values():
            model.ranks.call(TrainingBackend.to_device)

    def flops_metrics(self) -> Metrics:
        """Floating-point operations per second of inference and training since the last call, with
        train.count_flops."""
        metrics = Metrics()
        if not self._config.train.count_flops:
            return metrics
        work = [model.take_work() for model in self.by_role.values()]
        for name, flops, seconds in (
            ("infer", sum(w.infer_flops for w in work), sum(w.infer_s for w in work)),
            ("train", sum(w.train_flops for w in work), sum(w.train_s for w in work)),
        ):
            if flops:
                metrics.mean(f"flops/{name}_per_s", flops / seconds)
        return metrics

    def held_bytes(self) -> Mapping[str, Mapping[str, int]]:
        """Memory held by each role and by the engine's cache, in bytes. Gradients exist only during a
        step."""
        roles = {role: asdict(model.held_bytes()) for role, model in self.by_role.items()}
        return roles | {"engine": {"kv_cache": self.rollouts.cache_bytes}}

    def write(
        self, state: Mapping[str, Any], folder: Path
    ) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
        """Have the models' workers write to `folder`. Returns `state` with the rest that `restore` needs for
        a bit-exact resume, and the files written."""
        whole: dict[str, object] = dict(state)
        has_opponent = self._config.env.opponents_every_rounds is not None
        whole["opponent"] = self.rollouts.workers.first(Collector).opponent_state() if has_opponent else None
        files: dict[str, dict[str, object]] = {}
        for role, model in self._saved().items():
            whole[role], written = model.save(folder / role)
            files |= {f"{role}/{name}": line for name, line in written.items()}
        return whole, files

    def restore(self, state: Mapping[str, Any], folder: Path, *, is_warm: bool) -> None:
        """Restore the models from the checkpoint in `folder`; if `is_warm`, without the warm-up."""
        if is_warm:
            self.warm_up = None
        for role, model in self._saved().items():
            if state.get(role) is not None:
                model.restore(state[role], folder / role)

    def answer(self, within_s: float) -> bool:
        """Whether all ranks of the models to save answer a call: one that is stopped, or waits for another
        process that is, does not."""
        calls = [
            (model.ranks, model.ranks.start(TrainingBackend.data_place)) for model in self._saved().values()
        ]
        until_s = time.monotonic() + within_s
        return all(ranks.is_done(call, max(0.0, until_s - time.monotonic())) for ranks, call in calls)

    def _saved(self) -> dict[str, ModelGroup]:
        """The models to save in a checkpoint. Excludes a reference that always equals the folder it was
        loaded from, and inference, which equals the policy; during the warm-up, only the model being
        trained."""
        if self.warm_up is not None:
            return {"warm_up": self.warm_up.model}
        config = self._config.reference
        changes = config.path is None or config.update_every_epochs > 0
        unsaved = ("inference",) if changes else ("inference", "reference")
        return {
            role: model
            for role, model in self.by_role.items()
            if role not in unsaved and not role.startswith("reference_")
        }


def _copy(
    source: ModelGroup, target: ModelGroup, *, merged: bool = False, heads_differ: bool = False
) -> None:
    weights = source.ranks.start(TrainingBackend.full_weights, merged).refs[0]
    target.ranks.call(TrainingBackend.load_weights, weights, heads_differ=heads_differ)
