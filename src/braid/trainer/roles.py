"""Builds the backends of a run's training roles: policy, critic and reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from braid.config.roles import TrainingRole
from braid.config.schema import RunConfig
from braid.errors import ConfigError
from braid.models.base import copy_weights
from braid.plan import Plan
from braid.training.group import GroupBackend

from .supervised import Supervised


class NewBackend(Protocol):
    """Creates the model of a role on its workers."""

    def __call__(self, role: TrainingRole, *, total_steps: int) -> GroupBackend: ...


@dataclass(frozen=True, slots=True)
class Roles:
    """Backends of the training roles, and how weights are copied between them: `follow_policy` and
    `update_reference` as in Parts."""

    policy: GroupBackend
    critic: GroupBackend | None
    reference: GroupBackend | None
    follow_policy: Callable[[], None]
    update_reference: Callable[[], None]
    inference: GroupBackend | None = None


def device_of(config: RunConfig) -> torch.device:
    """The device that run.device names; auto is CUDA if there is a GPU."""
    name = config.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda, but torch finds no GPU; set run.device to cpu or auto")
    return torch.device(name)


def roles_on_workers(
    config: RunConfig, plan: Plan, new_backend: NewBackend, supervised: Supervised | None
) -> Roles:
    """Create each role's backend on its ranks with `new_backend`. Weights pass between them by object
    reference."""

    def made(role: TrainingRole, total_steps: int) -> GroupBackend | None:
        return new_backend(role, total_steps=total_steps) if plan.layout.role(role) else None

    policy = (
        supervised.backend
        if plan.verb == "sft" and supervised
        else new_backend("policy", total_steps=plan.num_steps)
    )
    critic, reference = made("critic", plan.num_critic_steps), made("reference", 0)
    has_adapters = config.model.lora is not None

    def follow_policy() -> None:
        """Copy the warm-up's weights to the roles. Without a warm-up all start from the same weights."""
        if supervised is None:
            return
        weights = supervised.backend.start_full_weights()
        policy.load_weights(weights)
        if reference is not None and config.reference.path is None:
            reference.load_weights(weights)
        if critic is not None and config.critic.path is None:
            merged = supervised.backend.start_full_weights(merged=True) if has_adapters else weights
            critic.load_weights(merged)
        supervised.backend.close()

    def update_reference() -> None:
        """Copy the policy's weights to the reference: merged if it was loaded from a separate folder and so
        has no adapters."""
        if reference is not None:
            is_merged = has_adapters and config.reference.path is not None
            reference.load_weights(policy.start_full_weights(merged=is_merged))

    return Roles(policy, critic, reference, follow_policy, update_reference, made("inference", 0))


def export_policy(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, policy: GroupBackend, folder: Path
) -> None:
    """Write the policy as a Hugging Face folder, from full weights gathered in this process."""
    from braid.checkpoint.export import export_model  # the driver needs models only here
    from braid.models.roles import make_policy

    lm = make_policy(config, torch.device("cpu"))
    copy_weights(policy.full_weights(), lm.named_weights())
    export_model(lm, tokenizer, folder)
