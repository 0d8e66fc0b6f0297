"""What a worker process of a training role makes when it starts."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist

from braid.config.schema import RunConfig
from braid.config.train import TrainConfig
from braid.models.base import TrainableModel
from braid.models.roles import TrainingRole, make_critic, make_policy, make_reference, train_config
from braid.runtime.workers import Place

from .group import ShardedBackend

Wrap = Callable[[TrainableModel, TrainConfig, int, torch.device], ShardedBackend]
"""(model, settings, total_steps, device) -> this rank's part of it."""


def make_backend(place: Place, *, role: TrainingRole, config: RunConfig, total_steps: int) -> ShardedBackend:
    """The part of a role's model that this rank has, with the weights that the config gives a fresh run."""
    train = train_config(config, role)
    wrap = _WRAPS[train.backend]
    device = _join(place, config)
    make = {"policy": make_policy, "critic": make_critic, "reference": make_reference}[role]
    return wrap(make(config, device), train, total_steps, device)


def _fsdp(
    model: TrainableModel, train: TrainConfig, total_steps: int, device: torch.device
) -> ShardedBackend:
    from .backends.fsdp import FsdpBackend

    assert train.backend in ("fsdp", "fsdp2"), f"{train.backend} is neither"
    return FsdpBackend(model, train, total_steps=total_steps, device=device, kind=train.backend)


_WRAPS: dict[str, Wrap] = {"fsdp": _fsdp, "fsdp2": _fsdp}


def _join(place: Place, config: RunConfig) -> torch.device:
    """The device of this rank, with the group's ranks in touch."""
    is_cuda = config.run.device == "cuda" or (config.run.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    torch.set_num_threads(config.run.num_threads or 1)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.size,
        timeout=datetime.timedelta(seconds=config.cluster.call_timeout_s),
    )
    return device
