"""The processes of training roles: how ranks join, the models that they hold, and what leaves them: synced
weights and exported models.

Only what every process needs is imported at the top; the driver names these classes and functions too.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import PreTrainedTokenizerBase

from braid.cluster.loops import call_until
from braid.cluster.workers import Place
from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig
from braid.errors import ConfigError, TrainingError
from braid.plan import longest_row
from braid.types import Spaces
from braid.weights.sender import join_send, open_sender
from braid.weights.sending import Sender, SendOptions

from .backend import TrainingBackend

if TYPE_CHECKING:
    from braid.models.base import TrainableModel

    from .backends.single.backend import SingleBackend


def device_of(config: RunConfig) -> torch.device:
    """The device that run.device names; auto is CUDA if there is a GPU. Raises ConfigError if there is
    none."""
    name = config.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda, but torch finds no GPU; set run.device to cpu or auto")
    return torch.device(name)


def _own_device(config: RunConfig) -> torch.device:
    """device_of with the index of this process's GPU."""
    device = device_of(config)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


class Rank:
    """A process of training roles. Their models are workers beside it, which take turns."""

    def __init__(self, place: Place, *, config: RunConfig) -> None:
        """Join the other ranks of the group. Raises TrainingError if they cannot exchange data."""
        self._config, self._workers, self._address = config, place.workers, place.address
        self._device = _join(place, config)
        self._sender: Sender | None = None
        check_reach(self._device, place, config.cluster.start_timeout_s)

    def open_sender(self, engines: Sequence[str], options: SendOptions) -> dict[str, Any] | None:
        """Open a weight sender to `engines` on rank 0 and return its ticket; None on the other ranks."""
        if dist.get_rank() != 0:
            return None
        host = options.host or self._address
        self._sender = open_sender(engines, replace(options, device=self._device, host=host))
        return self._sender.ticket.as_dict()

    def send_weights(self, version: int, merged: bool) -> None:
        """Send the policy's weights as `version` to the engines of `open_sender`; `merged` as in
        TrainingBackend.iter_weights."""
        join_send(self._sender, version, self._workers["policy"].iter_weights(merged=merged))

    def export(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write the policy as a Hugging Face folder, on rank 0."""
        weights = self._workers["policy"].full_weights()
        if dist.get_rank() == 0:
            from braid.models.base import copy_weights
            from braid.models.export import export_model
            from braid.models.roles import make_policy

            lm = make_policy(self._config, torch.device("cpu"))
            copy_weights(weights, lm.named_weights())
            export_model(lm, tokenizer, folder)

    def close(self) -> None:
        """Close the weight sender."""
        if self._sender is not None:
            self._sender.close()


def make_backend(
    place: Place,
    *,
    role: TrainingRole,
    config: RunConfig,
    total_steps: int,
    spaces: Spaces | None = None,
    is_reward_model: bool = False,
) -> TrainingBackend:
    """Build this rank's part of a role's model, in the process of a Rank or in that of the driver.
    `total_steps` is the length of the learning rate schedule. A reference in the process of a policy is that
    policy's. `spaces` are those of a simulator in another process. With `is_reward_model` a reward model
    takes the policy's place."""
    train, device = train_config(config, role), _own_device(config)
    if is_reward_model:
        from braid.models.roles import make_reward_model

        rank = dist.get_rank() if train.backend.is_sharded else None
        model = make_reward_model(config, device, rank=rank)
        return train.backend.build(model, train, total_steps=total_steps, device=device)
    if train.backend.is_sharded:
        backend = _sharded(role, config, train, total_steps, device, spaces)
    else:
        backend = _single(place, role, config, total_steps, device, spaces)
    if role == "reference" and (policy := place.workers.get("policy")) is not None:
        policy.use_reference(backend.logits)
    return backend


def _single(
    place: Place,
    role: TrainingRole,
    config: RunConfig,
    total_steps: int,
    device: torch.device,
    spaces: Spaces | None,
) -> TrainingBackend:
    """A model in one process, sharing what it can with the policy there."""
    from braid.models.causal_lm import CausalLM
    from braid.models.roles import make_critic, make_policy, make_reference, make_robot_model

    policy: SingleBackend | None = place.workers.get("policy")
    lm = policy.model if policy is not None and isinstance(policy.model, CausalLM) else None
    if config.model.kind.is_robot:
        policy_model = None if policy is None else policy.model
        model: TrainableModel = make_robot_model(
            role, config, spaces or place.workers["env"].spaces, device, policy_model
        )
    elif role == "critic":
        model = make_critic(config, device, lm)
    elif role == "reference":
        model = make_reference(config, device, lm)
    else:  # a warm-up trains the policy's own weights
        model = lm if lm is not None and role == "policy" else make_policy(config, device)
    train = train_config(config, role)
    return train.backend.build(model, train, total_steps=total_steps, device=device)


def _sharded(
    role: TrainingRole,
    config: RunConfig,
    train: TrainConfig,
    total_steps: int,
    device: torch.device,
    spaces: Spaces | None,
) -> TrainingBackend:
    """This rank's part of a model, compared with the whole model's log-probs."""
    from braid.models.causal_lm import CausalLM
    from braid.models.loading import TORCH_DTYPES
    from braid.models.roles import make_critic, make_policy, make_reference, make_robot_model
    from braid.models.selfcheck import PlainLogprobs

    from .backends.single.backend import autocast_dtype

    if spaces is not None:
        robot = make_robot_model(role, config, spaces, torch.device("cpu"), rank=dist.get_rank())
        return train.backend.build(robot, train, total_steps=total_steps, device=device)
    make = {"critic": make_critic, "reference": make_reference}.get(role, make_policy)
    rank = dist.get_rank()
    model = make(config, device, rank=rank)
    if not isinstance(model, CausalLM) or train.liger_kernels:  # Liger needs a GPU
        return train.backend.build(model, train, total_steps=total_steps, device=device)
    types = [autocast_dtype(train, device)]
    if (gathered := train.backend.parameter_dtype()) is not None:
        types.append(TORCH_DTYPES[gathered])
    dtype = max((t for t in types if t), key=lambda t: torch.finfo(t).eps, default=None)
    plain = PlainLogprobs.of(model, longest_row(config), dtype, is_hollow=rank > 0)
    backend = train.backend.build(model, train, total_steps=total_steps, device=device)
    outputs = backend.infer(plain.rows, frozenset({"logprobs"}), plain.rows[0])
    logprobs = [row["logprobs"] for row in outputs]
    if rank == 0:  # the others may get their weights only when they are wrapped
        plain.check(logprobs, train.backend.kind)
    backend.take_work()  # not the run's
    return backend


def _join(place: Place, config: RunConfig) -> torch.device:
    """This rank's device, after the process group has been initialised."""
    device = _own_device(config)
    timeout = datetime.timedelta(seconds=config.cluster.call_timeout_s)
    # Of the groups that libraries create; NCCL's would be 10 minutes.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_store(place, timeout),
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
    )
    return device


def check_reach(device: torch.device, place: Place, timeout_s: float) -> None:
    """Exchange a number between all ranks. Raises TrainingError if that fails or takes longer than
    `timeout_s`."""
    number, how = torch.ones(1, device=device), "nccl" if device.type == "cuda" else "gloo"
    try:
        call_until(lambda: (dist.all_reduce(number), number.item()), time.monotonic() + timeout_s)
    except (RuntimeError, TimeoutError) as error:
        variable = f"{how.upper()}_SOCKET_IFNAME"
        raise TrainingError(
            f"rank {place.rank} of {place.size} on {socket.gethostname()} cannot exchange data with the "
            f"others by {how} within {timeout_s:g} s ({str(error) or 'no answer'}). Its network interface "
            f"is {os.environ.get(variable) or 'chosen by ' + how}; set {variable} in cluster.env to one by "
            "which all machines reach each other, and open all ports between them (NCCL_DEBUG=INFO logs "
            "more), or raise cluster.start_timeout_s"
        ) from error


def _store(place: Place, timeout: datetime.timedelta) -> dist.Store:
    """The TCP store at which ranks meet."""
    if place.rendezvous is None:
        return dist.HashStore()
    host, port = place.rendezvous
    listener = None if place.listener is None else place.listener.detach()  # the store closes it
    return dist.TCPStore(
        host,
        port,
        place.size,
        is_master=place.rank == 0,
        timeout=timeout,
        master_listen_fd=listener,
    )
