"""Costs of a round other than time: floating-point operations and memory, if the config enables them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from braid.training.backend import TrainingBackend
from braid.types import Group

from .parts import Parts


def start_sampling(parts: Parts) -> None:
    """Until `end_sampling`, keep in host memory what train.offload names; at all other times engines that share devices
    with models sleep."""
    for model in parts.models.values():
        model.ranks.call(TrainingBackend.to_host)
    parts.rollouts.wake()


def end_sampling(parts: Parts) -> None:
    """See start_sampling. Not called after an error: the run ends or rebuilds its parts."""
    parts.rollouts.sleep()
    for model in parts.models.values():
        model.ranks.call(TrainingBackend.to_device)


def count_sampling(parts: Parts, groups: Sequence[Group]) -> None:
    """Record what this round's sampling wrote, and its rates; floating-point operations by the formula of models.flops."""
    trajectories = [t for group in groups for t in group.sampled]
    outputs = sum(t.num_output_tokens for t in trajectories)
    metrics, seconds = parts.metrics, parts.metrics.value("time/rollout_s")
    metrics.add("rollout/tokens", outputs)
    metrics.mean("rollout/tokens_per_s", outputs / seconds)
    if env_steps := sum(t.lengths.env_steps for t in trajectories):
        metrics.add("env/steps", env_steps)
        metrics.mean("env/steps_per_s", env_steps / seconds)
    if not parts.config.train.count_flops:
        return
    lengths = [t.lengths.total for t in trajectories]
    flops = parts.policy.ranks.call(TrainingBackend.flops, lengths, outputs)[0]
    metrics.mean("flops/rollout_per_s", flops.forward / seconds)


def count_training(parts: Parts) -> None:
    """Record the floating-point operations per second of inference and training since the last call."""
    if not parts.config.train.count_flops:
        return
    done = [model.take_work() for model in parts.models.values()]
    for name, flops, seconds in (
        ("infer", sum(w.infer_flops for w in done), sum(w.infer_s for w in done)),
        ("train", sum(w.train_flops for w in done), sum(w.train_s for w in done)),
    ):
        if flops:
            parts.metrics.mean(f"flops/{name}_per_s", flops / seconds)


def held_bytes(parts: Parts) -> Mapping[str, Mapping[str, int]]:
    """Memory held by each role and by the engine's cache, in bytes. Gradients exist only during a step."""
    roles = {role: asdict(model.held_bytes()) for role, model in parts.models.items()}
    return roles | {"engine": {"kv_cache": parts.rollouts.cache_bytes}}
