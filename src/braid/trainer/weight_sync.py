"""How the policy's ranks send weights to engines in other processes."""

from __future__ import annotations

from os.path import isdir  # False for names that no file can have

import torch

from braid.config.schema import RunConfig
from braid.models.tokenizer import model_path
from braid.plan.layout import Layout
from braid.plan.parallel import served_engine
from braid.weights.sending import SendOptions
from braid.weights.transports import Meeting, choose_transport, on_existing

_DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def send_options(config: RunConfig, layout: Layout, folder: str, device: torch.device) -> SendOptions:
    """How the policy's first rank, on `device`, sends weights to engines; `folder` is for transports that use
    files. Raises ConfigError for a transport that cannot work between them."""
    policy, rollout = layout.role("policy"), layout.role("rollout")
    assert policy is not None, "every run has a policy"
    assert rollout is not None, "every run samples"
    first, sync = policy.workers[0], config.rollout.weight_sync
    is_cuda = device.type == "cuda"
    devices = [set(worker.devices) for worker in rollout.workers]
    shared = [bool(engine_devices & set(first.devices)) for engine_devices in devices]
    engine = served_engine(config)
    servers = engine.servers if engine else ()
    meeting = Meeting(
        is_one_machine=all(worker.node == first.node for worker in rollout.workers),
        is_one_device=is_cuda and all(engine_devices == set(first.devices) for engine_devices in devices),
        # NCCL allows one rank per GPU: if only some engines share the sender's GPU, weights go through host
        # memory.
        is_cuda=is_cuda and (all(shared) or not any(shared)),
        reads_folders=engine is not None and engine.reads_folders,
    )
    transport = choose_transport(sync, meeting)
    return SendOptions(
        transport,
        bucket_bytes=sync.bucket_bytes,
        timeout_s=config.cluster.call_timeout_s,
        device=device,
        dtype=_DTYPES[engine.dtype] if engine else None,
        existing=on_existing(sync, is_server=bool(servers)),
        # None: the sender listens at the address by which the cluster knows its machine.
        host="127.0.0.1" if meeting.is_one_machine and not servers else None,
        folder=folder,
        beside=_folder(config),
    )


def _folder(config: RunConfig) -> str | None:
    """The model's folder; None for a model without one, such as a name on the Hugging Face Hub."""
    path = None if config.model.path is None else model_path(config.model)
    return path if path is not None and isdir(path) else None
