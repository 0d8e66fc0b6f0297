"""Construction of each training role's model from the config of a new run.

With `rank`, the model stays in host memory, to be sharded over the role's ranks (see load_policy).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Literal

import torch

from braid.config.model import ModelConfig
from braid.config.roles import TrainingRole, train_config
from braid.config.rollout import RolloutConfig
from braid.config.schema import RunConfig
from braid.errors import ModelError
from braid.plan import longest_row
from braid.plan.sizes import is_worth_compiling, policy_size
from braid.types import Spaces

from .adapter_reference import AdapterReference
from .base import TrainableModel
from .causal_lm import CausalLM
from .cpu_kernels import cpu_kernels
from .loading import load_policy
from .reward_model import HEAD_NAME, check_classifies
from .value import ValueModel
from .vision import freeze

_log = logging.getLogger(__name__)


def make_policy(config: RunConfig, device: torch.device, *, rank: int | None = None) -> CausalLM:
    """Build the policy from the weights in its folder or random ones, with adapters if configured."""
    train = config.train
    lm = load_policy(
        _with_kernels(config, device),
        temperature=config.rollout.sampling.temperature,
        seed=config.run.seed,
        device=device,
        train=train,
        rank=rank,
        longest=longest_row(config),
        images=config.data.image,
    )
    lm.mixture, lm.top_k = config.algorithm.kl_mixture, config.algorithm.kl_top_k or 1
    check_engine(lm, config.rollout)
    lm.set_gradient_checkpointing(train.gradient_checkpointing)
    if train.router_replay != "none":
        lm.prepare_routers("train.router_replay")
        lm.replays_experts = True
    if train.router_aux_coef:
        lm.prepare_routers("train.router_aux_coef")
        lm.check_balance()
    elif lm.routers is not None:
        with suppress(ModelError):  # without metrics of the logits then
            lm.prepare_routers("train.router_aux_coef")
    return lm


def check_engine(lm: CausalLM, rollout: RolloutConfig) -> None:
    """Raise ModelError if `rollout.engine` cannot sample this policy."""
    engine = rollout.engine
    if lm.has_states and engine.is_served:
        raise ModelError(
            f"rollout.engine={engine.kind} cannot sample {type(lm.model).__name__}: weights that are synced "
            "to layers with a state have been corrupted on loading there (vllm#48284), and braid does not "
            "check them yet; set rollout.engine=native"
        )


def make_critic(
    config: RunConfig, device: torch.device, policy: CausalLM | None = None, *, rank: int | None = None
) -> ValueModel:
    """Build the critic on a backbone from its own folder, or on a copy of `policy` (which is built if
    None)."""
    train = train_config(config, "critic")
    head = {"head_name": config.critic.head_name, "normalizes": config.critic.normalize_values}
    if config.critic.path is None:
        source = policy or make_policy(config, device, rank=rank)
    else:
        source = _load_folder(config, "critic", config.critic.path, device, rank)
    if source is policy or source.has_adapters:
        critic = ValueModel.copy_of(source, **head)
        if config.model.vision is not None:
            freeze(critic.backbone, config.model.vision)
    else:  # the backbone is not used elsewhere
        critic = ValueModel(source.backbone, attention=source.attention, vision=source.vision, **head)
    critic.set_gradient_checkpointing(train.gradient_checkpointing)
    return critic


def make_reward_model(config: RunConfig, device: torch.device, *, rank: int | None = None) -> ValueModel:
    """Build a reward model on the policy's backbone, with the names of weights and the head of transformers'
    sequence classifiers. Raises ModelError for an architecture that has none there."""
    source = make_policy(config, device, rank=rank)
    check_classifies(source)
    reward = ValueModel(source.backbone, head_name=HEAD_NAME, has_bias=False, attention=source.attention)
    reward.set_gradient_checkpointing(config.train.gradient_checkpointing)
    return reward


def make_reference(
    config: RunConfig, device: torch.device, policy: CausalLM | None = None, *, rank: int | None = None
) -> CausalLM | AdapterReference:
    """Build the reference from its own folder, or as a frozen copy of `policy` (which is built if None). For
    a given `policy` with adapters only the adapters are copied; the base weights are shared."""
    train = train_config(config, "reference")
    if config.reference.path is None:
        is_shared = policy is not None
        policy = policy or make_policy(config, device, rank=rank)
        if is_shared and policy.has_adapters:
            return AdapterReference(policy)
        reference = policy.frozen_copy() if is_shared else policy
        reference.replays_experts = False
        reference.chunk_bytes, reference.compiles = train.logprob_chunk_bytes, train.compile
    else:
        reference = _load_folder(config, "reference", config.reference.path, device, rank)
    reference.module.requires_grad_(False)
    reference.top_k = config.algorithm.kl_top_k or 1
    return reference


def make_robot_model(
    role: TrainingRole,
    config: RunConfig,
    spaces: Spaces,
    device: torch.device,
    policy: TrainableModel | None = None,
    *,
    rank: int | None = None,
) -> TrainableModel:
    """Build the policy or the critic for a simulator's observations and actions. A given `policy` is the
    run's own: a warm-up trains it, and the critic of a vision-language-action policy starts as a copy of
    it."""
    assert role in ("policy", "critic"), f"simulators have no {role}"
    if role == "policy" and policy is not None:
        return policy
    model = config.model.kind.make(role, config, spaces, device, policy, rank)
    model.module.to(device)
    return model


def _with_kernels(config: RunConfig, device: torch.device) -> ModelConfig:
    """`config.model` with `attention: auto` resolved: the same for every process and every resume of a
    run."""
    if config.model.attention != "auto" or device.type != "cpu":
        return config.model
    size = policy_size(config)
    if size is None:
        why_not: str | None = "the model's size is not known before it is loaded (model.attention)"
    elif is_worth_compiling(config, size.parameters):
        why_not = cpu_kernels().why_not
    else:
        why_not = "rounds are too short for that (model.attention)"
    _log.info("attention in training is %s", f"not compiled: {why_not}" if why_not else "compiled by Numba")
    return config.model if why_not else config.model.model_copy(update={"attention": "compiled"})


def _load_folder(
    config: RunConfig, role: Literal["critic", "reference"], path: str, device: torch.device, rank: int | None
) -> CausalLM:
    """Load the language model in a role's own folder."""
    return load_policy(
        _with_kernels(config, device).model_copy(
            update={"path": path, "gguf": None, "build": None, "lora": None}
        ),
        temperature=config.rollout.sampling.temperature,
        seed=0,
        device=device,
        train=train_config(config, role),
        key=role,
        rank=rank,
        longest=longest_row(config),
        images=config.data.image,
    )
