"""The training roles of a run: policy, critic and reference as backends."""

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
    """Makes the model of a role on its workers."""

    def __call__(self, role: TrainingRole, *, total_steps: int) -> GroupBackend: ...


@dataclass(frozen=True, slots=True)
class Roles:
    """Who trains, and how their weights follow each other: `follow_policy` and `update_reference` as in Parts."""

    policy: GroupBackend
    critic: GroupBackend | None
    reference: GroupBackend | None
    follow_policy: Callable[[], None]
    update_reference: Callable[[], None]
    inference: GroupBackend | None = None


def device_of(config: RunConfig) -> torch.device:
    """The device that run.device names; auto takes CUDA when there is a GPU."""
    name = config.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda, but torch sees no GPU; set run.device=cpu or auto")
    return torch.device(name)


def roles_on_workers(
    config: RunConfig, plan: Plan, new_backend: NewBackend, supervised: Supervised | None
) -> Roles:
    """Each role on ranks that `new_backend` knows. Weights go from one to another by reference."""

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
        """Without a warm-up all have begun with the same weights."""
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
        """One of its own folder has no adapters, others have the policy's."""
        if reference is not None:
            is_merged = has_adapters and config.reference.path is not None
            reference.load_weights(policy.start_full_weights(merged=is_merged))

    return Roles(policy, critic, reference, follow_policy, update_reference, made("inference", 0))


def export_policy(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, policy: GroupBackend, folder: Path
) -> None:
    """Write the policy as a Hugging Face folder, from whole weights in this process."""
    from braid.checkpoint.export import export_model  # the loop needs no models but for this
    from braid.models.roles import make_policy

    lm = make_policy(config, torch.device("cpu"))
    copy_weights(policy.full_weights(), lm.named_weights())
    export_model(lm, tokenizer, folder)
