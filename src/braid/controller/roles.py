"""The training roles of a run: policy, critic and reference as backends, in this process or on workers."""

from __future__ import annotations

from functools import partial

import torch

from braid.config.schema import RunConfig
from braid.errors import ConfigError
from braid.models.adapter_reference import AdapterReference
from braid.models.base import TrainableModel, copy_weights
from braid.models.causal_lm import CausalLM
from braid.models.roles import train_config
from braid.models.value import ValueModel
from braid.plan import Plan
from braid.plan.placement import num_processes
from braid.training.backend import TrainingBackend
from braid.training.backends.single import SingleBackend
from braid.training.group import GroupBackend
from braid.training.worker import make_backend


def device_of(config: RunConfig) -> torch.device:
    """The device that run.device names; auto takes CUDA when there is a GPU."""
    name = config.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda, but torch sees no GPU; set run.device=cpu or auto")
    return torch.device(name)


def critic_backend(
    config: RunConfig, plan: Plan, critic: TrainableModel, device: torch.device
) -> SingleBackend:
    train = train_config(config, "critic")
    return SingleBackend(critic, train, total_steps=plan.num_critic_steps, device=device)


def policy_group(config: RunConfig, plan: Plan, lm: CausalLM) -> GroupBackend:
    """The policy on worker processes; `lm` mirrors it here, for the engine and for copies."""
    from braid.runtime.ray import RayGroup, connect  # it takes a second, and few runs have workers

    cluster = config.cluster
    size = num_processes("policy", cluster.placement, cluster.devices_per_node)
    is_new = connect(cluster, num_processes=size)
    make = partial(make_backend, role="policy", config=config, total_steps=plan.num_steps)
    name = cluster.group_names.get("policy", "policy")
    workers = RayGroup(name, make, size, cluster, ends_cluster=is_new)
    return GroupBackend(workers, lm, balances=config.train.balance_ranks)


def follow(
    config: RunConfig,
    lm: CausalLM,
    critic: ValueModel | None,
    reference: CausalLM | AdapterReference | None,
    policy: TrainingBackend,
) -> None:
    """Copy the policy's weights into the reference and the critic's backbone, where they have no path of their own; and
    those of a warm-up into the policy's workers."""
    if isinstance(policy, GroupBackend):
        policy.take_weights()
    if reference is not None and config.reference.path is None:
        copy_weights(dict(lm.named_weights()), reference.named_weights())
    if critic is not None and config.critic.path is None:
        copy_weights(dict(lm.merged_weights()), critic.named_weights())


def update_reference(lm: CausalLM, reference: CausalLM | AdapterReference | None) -> None:
    """Copy the policy's weights into the reference, whatever it began with."""
    if reference is None:
        return
    is_alike = isinstance(reference, AdapterReference) or not lm.has_adapters
    weights = lm.named_weights() if is_alike else lm.merged_weights()
    copy_weights(dict(weights), reference.named_weights())
