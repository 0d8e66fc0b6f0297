"""Training worker processes: their start, and the models that they hold."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from braid.cluster.loops import call_until
from braid.cluster.workers import Place
from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig
from braid.errors import TrainingError
from braid.models.base import TrainableModel
from braid.models.causal_lm import CausalLM
from braid.models.loading import TORCH_DTYPES
from braid.models.roles import make_critic, make_policy, make_reference
from braid.models.selfcheck import PlainLogprobs
from braid.plan import longest_row
from braid.types import Row
from braid.weights.sender import join_send, open_sender
from braid.weights.sending import Sender, SendOptions

from .backends.single import autocast_dtype
from .group import ShardedBackend

Wrap = Callable[[TrainableModel, TrainConfig, int, torch.device], ShardedBackend]
"""(model, settings, total_steps, device) -> this rank's part of it."""


def make_backend(place: Place, *, role: TrainingRole, config: RunConfig, total_steps: int) -> ShardedBackend:
    """This rank's part of a role's model, with the initial weights of the config."""
    return _backend_of(role, config, total_steps, _join(place, config))


class Ranks:
    """A process of a training group: holds the models of all roles placed there, which take turns."""

    def __init__(self, place: Place, *, config: RunConfig) -> None:
        """Starts without models."""
        self._device, self._place = _join(place, config), place
        self._start_timeout_s = config.cluster.start_timeout_s
        self._backends: dict[str, ShardedBackend] = {}
        self._sender: Sender | None = None

    def add(self, name: str, role: TrainingRole, config: RunConfig, total_steps: int) -> None:
        """Build this rank's part of a role's model under `name`. A reference is the one of a policy here."""
        if not self._backends:
            check_reach(self._device, self._place, self._start_timeout_s)
        self._backends[name] = _backend_of(role, config, total_steps, self._device)
        if role == "reference" and "policy" in self._backends:
            self._backends["policy"].use_reference(self._backends[name].logits)

    def __getattr__(self, name: str) -> Any:
        """`NAME.METHOD` is that method of the backend `NAME`."""
        backend, _, method = name.partition(".")
        if not method or backend not in self._backends:
            raise AttributeError(f"workers have no {name}")
        return getattr(self._backends[backend], method)

    def drop(self, name: str) -> None:
        """Free a model."""
        del self._backends[name]

    def open_sender(self, engines: Sequence[str], options: SendOptions) -> dict[str, Any] | None:
        """Open a weight sender to `engines` on rank 0 and return its ticket; None on the other ranks."""
        if dist.get_rank() != 0:
            return None
        self._sender = open_sender(engines, replace(options, device=self._device))
        return self._sender.ticket.as_dict()

    def send_weights(self, name: str, version: int, merged: bool) -> None:
        """Send a model's weights as `version` to the engines of `open_sender`; `merged` as in
        ShardedBackend.iter_weights."""
        join_send(self._sender, version, self._backends[name].iter_weights(merged=merged))

    def close(self) -> None:
        """Close the weight sender."""
        if self._sender is not None:
            self._sender.close()


def _backend_of(
    role: TrainingRole, config: RunConfig, total_steps: int, device: torch.device
) -> ShardedBackend:
    train = train_config(config, role)
    wrap = _WRAPS[train.backend]
    rank = None if train.backend == "single" else dist.get_rank()
    model = _MODELS[role](config, device, rank=rank)
    if rank is None or not isinstance(model, CausalLM) or train.liger_kernels:  # Liger needs a GPU
        return wrap(model, train, total_steps, device)
    types = [autocast_dtype(train, device)]
    if "fsdp" in train.backend and train.fsdp.param_dtype:
        types.append(TORCH_DTYPES[train.fsdp.param_dtype])
    dtype = max((t for t in types if t), key=lambda t: torch.finfo(t).eps, default=None)
    plain = PlainLogprobs.of(model, longest_row(config), dtype, is_hollow=rank > 0)
    backend = wrap(model, train, total_steps, device)
    rows = [Row({"input_ids": ids}, np.arange(len(ids)) > 0, i, i) for i, ids in enumerate(plain.rows)]
    found = [row["logprobs"] for row in backend.infer(rows, frozenset({"logprobs"}), rows[0])]
    if rank == 0:  # the others may get their weights only when they are wrapped
        plain.check(found, train.backend)
    backend.take_work()  # not the run's
    return backend


class _Make(Protocol):
    def __call__(self, config: RunConfig, device: torch.device, *, rank: int | None) -> TrainableModel: ...


_MODELS: dict[TrainingRole, _Make] = {
    "policy": make_policy,
    "critic": make_critic,
    "reference": make_reference,
    "inference": make_policy,
}


def _fsdp(
    model: TrainableModel, train: TrainConfig, total_steps: int, device: torch.device
) -> ShardedBackend:
    from .backends.fsdp import FsdpBackend

    assert train.backend in ("fsdp", "fsdp2"), f"unexpected backend {train.backend}"
    return FsdpBackend(model, train, total_steps=total_steps, device=device, kind=train.backend)


def _deepspeed(
    model: TrainableModel, train: TrainConfig, total_steps: int, device: torch.device
) -> ShardedBackend:
    from .backends.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(model, train, total_steps=total_steps, device=device)


def _megatron(
    model: TrainableModel, train: TrainConfig, total_steps: int, device: torch.device
) -> ShardedBackend:
    from .backends.megatron.backend import MegatronBackend

    return MegatronBackend(model, train, total_steps=total_steps, device=device)


def _single(
    model: TrainableModel, train: TrainConfig, total_steps: int, device: torch.device
) -> ShardedBackend:
    from .backends.single import SingleBackend

    assert dist.get_world_size() == 1, "backend single needs exactly one process"
    return SingleBackend(model, train, total_steps=total_steps, device=device)


_WRAPS: dict[str, Wrap] = {
    "single": _single,
    "fsdp": _fsdp,
    "fsdp2": _fsdp,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
}


def _join(place: Place, config: RunConfig) -> torch.device:
    """This rank's device, after the process group has been initialised."""
    is_cuda = config.run.device == "cuda" or (config.run.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    torch.set_num_threads(config.run.num_threads or 1)
    timeout = datetime.timedelta(seconds=config.cluster.call_timeout_s)
    # Of the groups that libraries create; NCCL's would be 10 minutes.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
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
            f"rank {place.rank} of {place.size} on {socket.gethostname()} cannot exchange data with the others by {how} within "
            f"{timeout_s:g} s ({str(error) or 'no answer'}). Its network interface is {os.environ.get(variable) or 'chosen by ' + how}; "
            f"set {variable} in cluster.env to one by which all machines reach each other, and open all ports between them "
            f"(NCCL_DEBUG=INFO logs more), or raise cluster.start_timeout_s"
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
