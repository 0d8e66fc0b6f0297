"""Weights that pass between the models of a run and its engines. On workers they pass by reference, past the driver."""

from __future__ import annotations

from braid.rollout.engine import NewWeights
from braid.training.backend import TrainingBackend
from braid.training.group import ModelGroup

from .parts import Parts


def follow_warm_up(parts: Parts) -> None:
    """Copy the weights of the supervised warm-up to the policy, the reference and the critic, unless the config gives
    those separate weights. Without a warm-up all start from the same weights."""
    if parts.supervised is None:
        return
    config, trained = parts.config, parts.supervised.model
    _copy(trained, parts.policy)
    if parts.reference is not None and config.reference.path is None:
        _copy(trained, parts.reference)
    if parts.critic is not None and config.critic.path is None:
        has_adapters = config.model.vla is not None  # critics of language models have none
        merged = config.model.lora is not None and not has_adapters
        _copy(trained, parts.critic, merged=merged, heads_differ=True)
    trained.ranks.close()


def follow_policy(parts: Parts) -> None:
    """Copy the policy's weights to the reference: merged if it was loaded from a separate folder and so has no
    adapters."""
    if parts.reference is not None:
        merged = parts.config.model.lora is not None and parts.config.reference.path is not None
        _copy(parts.policy, parts.reference, merged=merged)


def sync_weights(parts: Parts, when: NewWeights = "drain") -> None:
    """Sync the policy's weights to the engines, `when` as in Engine.set_weights, and to the role that computes its
    log-probs on separate devices, if there is one."""
    with parts.timed("sync_weights"):
        parts.rollouts.set_weights(parts.progress.round, when)
        if parts.inference is not None:
            _copy(parts.policy, parts.inference)


def _copy(
    source: ModelGroup, target: ModelGroup, *, merged: bool = False, heads_differ: bool = False
) -> None:
    weights = source.ranks.start(TrainingBackend.full_weights, merged).refs[0]
    target.ranks.call(TrainingBackend.load_weights, weights, heads_differ=heads_differ)
