"""The training roles of a run: policy, critic and reference as backends, in this process or on workers of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from braid.checkpoint.export import export_model
from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.errors import ConfigError
from braid.models.adapter_reference import AdapterReference
from braid.models.base import TrainableModel, copy_weights
from braid.models.causal_lm import CausalLM
from braid.models.roles import make_policy
from braid.models.value import ValueModel
from braid.plan import Plan
from braid.runtime.workers import InProcessGroup
from braid.training.backends.single import SingleBackend
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


def backend_here(
    role: TrainingRole,
    model: TrainableModel,
    config: RunConfig,
    device: torch.device,
    *,
    total_steps: int,
    keeps_weights: bool = False,
) -> GroupBackend:
    """A role's model in this process; arguments as in SingleBackend."""
    train = train_config(config, role)
    backend = SingleBackend(model, train, total_steps=total_steps, device=device, keeps_weights=keeps_weights)
    return GroupBackend(InProcessGroup(role, lambda _: backend))


def roles_here(
    config: RunConfig,
    plan: Plan,
    lm: CausalLM,
    critic: ValueModel | None,
    reference: CausalLM | AdapterReference | None,
    device: torch.device,
    *,
    supervised: Supervised | None,
    keeps_weights: bool,
) -> Roles:
    """All roles in this process. With `keeps_weights` the engine samples with the policy's own tensors."""
    here = partial(backend_here, config=config, device=device)
    policy = (
        supervised.backend
        if plan.verb == "sft" and supervised
        else here("policy", lm, total_steps=plan.num_steps, keeps_weights=keeps_weights)
    )

    def follow_policy() -> None:
        if reference is not None and config.reference.path is None:
            copy_weights(dict(lm.named_weights()), reference.named_weights())
        if critic is not None and config.critic.path is None:
            copy_weights(dict(lm.merged_weights()), critic.named_weights())

    def update_reference() -> None:
        if reference is None:
            return
        is_alike = isinstance(reference, AdapterReference) or not lm.has_adapters
        weights = lm.named_weights() if is_alike else lm.merged_weights()
        copy_weights(dict(weights), reference.named_weights())

    return Roles(
        policy,
        None if critic is None else here("critic", critic, total_steps=plan.num_critic_steps),
        None if reference is None else here("reference", reference, total_steps=0),
        follow_policy,
        update_reference,
    )


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
    lm = make_policy(config, torch.device("cpu"))
    copy_weights(policy.full_weights(), lm.named_weights())
    export_model(lm, tokenizer, folder)
