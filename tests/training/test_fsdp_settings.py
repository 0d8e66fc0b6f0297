"""Every key of fsdp and fsdp2 is in the settings of the modules that torch has wrapped, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.forks import run_ranks
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, FullyShardedDataParallel, ShardingStrategy

from braid.config.model import BuildSpec
from braid.config.train import TrainConfig
from braid.models.build import build_model
from braid.models.causal_lm import CausalLM
from braid.models.tokenizer import character_tokenizer
from braid.training.backends.fsdp.backend import FsdpBackend
from braid.training.losses import supervised_loss
from braid.types import Row

CPU = torch.device("cpu")
SPEC = BuildSpec(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, head_dim=16)


def _backend(kind: Any, autocast: str = "auto", **keys: Any) -> FsdpBackend:
    model = build_model(SPEC, character_tokenizer(SPEC.characters), dtype=torch.float32, seed=0)
    config = TrainConfig.model_validate(
        {"backend": {"kind": kind, **keys}, "autocast": autocast, "micro_batch_tokens": 8}
    )
    return FsdpBackend(CausalLM(model), config, total_steps=1, device=CPU)


def _modules(kind: Any, **keys: Any) -> list[Any]:
    """The root and the layers, as wrapped under these keys."""
    backend = _backend(kind, **keys)
    wrapped = FullyShardedDataParallel if kind == "fsdp" else FSDPModule
    return [module for module in backend._net.modules() if isinstance(module, wrapped)]


def _check_fsdp() -> None:
    strategies = {
        ("full", None): ShardingStrategy.FULL_SHARD,
        ("grad_op", None): ShardingStrategy.SHARD_GRAD_OP,
        ("hybrid", None): ShardingStrategy.FULL_SHARD,  # both ranks are on one machine
        ("none", None): ShardingStrategy.NO_SHARD,
        ("full", 1): ShardingStrategy.NO_SHARD,
    }
    for (sharding, size), strategy in strategies.items():
        modules = _modules("fsdp", sharding=sharding, size=size)
        assert len(modules) == 3
        assert all(module.sharding_strategy == strategy for module in modules)
    keys = {"forward_prefetch": True, "backward_prefetch": "pre", "limit_all_gathers": True}
    types = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    for module in _modules("fsdp", cpu_offload=True, **keys, **types):
        assert module.cpu_offload.offload_params
        assert module.forward_prefetch
        assert module.backward_prefetch == BackwardPrefetch.BACKWARD_PRE
        assert module.limit_all_gathers
        assert module.mixed_precision.param_dtype == torch.bfloat16
        assert module.mixed_precision.reduce_dtype == torch.float32
        assert module.mixed_precision.buffer_dtype == torch.float32
    for module in _modules("fsdp", param_dtype="bf16"):
        assert module.mixed_precision.reduce_dtype == torch.float32
        # rotary frequencies in bf16 are off by 1.2 rad at position 1,024
        assert module.mixed_precision.buffer_dtype is None


def _check_fsdp2() -> None:
    def groups(**keys: Any) -> list[Any]:
        return [module._get_fsdp_state()._fsdp_param_group for module in _modules("fsdp2", **keys)]

    for keys, num_shards, reshards in (
        ({}, 2, True),
        ({"reshard_after_forward": False}, 2, False),
        ({"sharding": "grad_op"}, 2, False),
        ({"sharding": "hybrid"}, 2, True),
        ({"size": 1}, 1, True),
        ({"sharding": "none"}, 1, True),
    ):
        root, *layers = groups(**keys)
        assert root.post_forward_mesh_info is None, (
            "the backward pass begins with what the forward ended with"
        )
        assert [layer.mesh_info.shard_mesh_size for layer in layers] == [num_shards] * 2
        assert all((layer.post_forward_mesh_info is not None) is reshards for layer in layers)
    for group in groups(cpu_offload=True, param_dtype="bf16", reduce_dtype="fp32"):
        assert group.mp_policy.param_dtype == torch.bfloat16
        assert group.mp_policy.reduce_dtype == torch.float32
        assert not group.offload_policy.pin_memory
        assert all(p.offload_to_cpu for p in group.fsdp_params)
    for group in groups(param_dtype="bf16"):
        assert group.mp_policy.reduce_dtype == torch.float32
    # float32 models are gathered in autocast's type, which would otherwise keep its own copy of all weights
    for autocast, param_dtype in (("none", None), ("bf16", torch.bfloat16), ("auto", None)):
        for module in _modules("fsdp2", autocast=autocast):
            policy = module._get_fsdp_state()._fsdp_param_group.mp_policy
            assert (policy.param_dtype, policy.reduce_dtype) == (param_dtype, torch.float32)


def _check_gradients() -> None:
    """The gradient norm of several micro-batches in bf16, reduced after the last one, is the same with every
    sharding."""
    rows = [Row({"input_ids": np.arange(3, 10)}, np.arange(7) > 0, i, i) for i in range(4)]
    norms = [
        _backend("fsdp", sharding=sharding, param_dtype="bf16", sync_last_micro_batch_only=True)
        .train(rows, [1 / 24] * 4, supervised_loss(), rows[0])
        .grad_norm
        for sharding in ("full", "grad_op", "none")
    ]
    assert norms == pytest.approx([norms[0]] * 3, rel=2**-8)  # roundings of bf16


def _check(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    _check_fsdp()
    _check_fsdp2()
    _check_gradients()
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_key_is_in_what_torch_has_wrapped(tmp_path: Path) -> None:
    run_ranks(_check, tmp_path)
