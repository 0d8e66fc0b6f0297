"""What a worker process of a training role makes when it starts."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from braid.config.schema import RunConfig
from braid.models.loading import load_policy
from braid.runtime.workers import Place

from .backends.fsdp import FsdpBackend


def make_policy(place: Place, *, config: RunConfig, total_steps: int) -> FsdpBackend:
    """The policy's shard of this rank, with the weights that the config gives a fresh run."""
    train = config.train
    assert train.backend in ("fsdp", "fsdp2"), f"{train.backend} has no worker"
    device = _join(place, config)
    lm = load_policy(
        config.model,
        temperature=config.rollout.sampling.temperature,
        seed=config.run.seed,
        device=device,
        chunk_bytes=train.logprob_chunk_bytes,
        compiles=train.compile,
        liger=train.liger_kernels,
    )
    lm.set_gradient_checkpointing(train.gradient_checkpointing)
    return FsdpBackend(lm, train, total_steps=total_steps, device=device, kind=train.backend)


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
