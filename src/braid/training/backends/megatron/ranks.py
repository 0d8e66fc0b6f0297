"""Megatron's process groups: tensor, pipeline, context, expert and data parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import distributed_c10d

from braid.errors import TrainingError

from .kind import Megatron

groups: Any = parallel_state
"""Megatron's process-wide registry of the groups."""


def join(config: Megatron) -> None:
    """Create the groups within the default process group, which must be initialized. Raises TrainingError if
    the world size is not divisible accordingly."""
    _check_device()
    parts = {
        "tensor_parallel": config.tensor_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "context_parallel": config.context_parallel,
    }
    world, model = dist.get_world_size(), torch.Size(parts.values()).numel()
    named = " x ".join(f"{key} {size}" for key, size in parts.items())
    if world % model:
        raise TrainingError(
            f"train.backend: {named} = {model} devices per model replica, but the policy has {world}; use "
            f"a multiple of {model} devices, or lower one of the three"
        )
    expert = config.expert_parallel * (config.expert_tensor_parallel or config.tensor_parallel)
    if (world // config.pipeline_parallel) % expert:
        raise TrainingError(
            f"train.backend: expert_parallel x expert_tensor_parallel = {expert} does not divide the "
            f"{world // config.pipeline_parallel} devices of a pipeline stage; set expert_parallel to a "
            "divisor of it"
        )
    _set_up(
        {
            "tensor_model_parallel_size": config.tensor_parallel,
            "pipeline_model_parallel_size": config.pipeline_parallel,
            "virtual_pipeline_model_parallel_size": config.virtual_pipeline,
            "context_parallel_size": config.context_parallel,
            "expert_model_parallel_size": config.expert_parallel,
            "expert_tensor_parallel_size": config.expert_tensor_parallel or config.tensor_parallel,
        },
        timeout_minutes=config.timeout_minutes or distributed_c10d.default_pg_timeout.total_seconds() / 60,
    )


_set_up_with: dict[str, int | None] = {}
"""Sizes of this process' groups. Megatron supports a single set of groups per process."""


def _set_up(sizes: dict[str, int | None], *, timeout_minutes: float) -> None:
    if groups.model_parallel_is_initialized():
        if sizes != _set_up_with:
            raise TrainingError(
                "two roles on the same devices have different sizes in train.backend, but Megatron "
                "supports only one set of process groups; use the same sizes, or separate devices in "
                "cluster.placement"
            )
        return
    groups.initialize_model_parallel(
        **sizes,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
        create_gloo_process_groups=False,
    )
    _set_up_with.update(sizes)
    # Any seed: initial weights are overwritten, but sequence parallelism forks the generator's state.
    model_parallel_cuda_manual_seed(0)


def _check_device() -> None:
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise TrainingError(
            f"train.backend=megatron needs a CUDA device ({error}); use fsdp2, fsdp or deepspeed on CPUs"
        ) from None
