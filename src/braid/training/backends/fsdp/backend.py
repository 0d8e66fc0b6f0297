"""FSDP and FSDP2 backends.

Every rank holds a shard of weights, gradients and optimizer states, and runs its own rows (see ranks).
"""

from __future__ import annotations

import socket
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from braid.config.backends import OffloadConfig
from braid.config.train import TrainConfig
from braid.errors import ModelError
from braid.models.base import Output, TrainableModel
from braid.models.batch import PackedBatch
from braid.models.lora import Recipe, recipes
from braid.models.value_head import ValueHead
from braid.training.backends.ranks import Pass, RankBackend
from braid.training.backends.single.backend import autocast_dtype
from braid.training.offload import moved
from braid.training.optimizer import HALF, build_optimizer, peak_rates
from braid.training.shards import Boxes

from .kind import AnyFsdp, Fsdp, Fsdp2

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
_SHARDINGS = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.FULL_SHARD,  # without replicas it equals full sharding
    "none": ShardingStrategy.NO_SHARD,
}
_HYBRIDS = {
    "full": ShardingStrategy.HYBRID_SHARD,
    "grad_op": ShardingStrategy._HYBRID_SHARD_ZERO2,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
    "none": ShardingStrategy.NO_SHARD,
}
"""Strategies for a mesh with several replicas of the shards."""
_PREFETCHES = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "off": None}


class FsdpBackend(RankBackend):
    """See RankBackend. Trainable half-precision weights have float32 shards, which serve as master weights;
    passes gather and compute in half precision, and exported weights are half precision too."""

    def __init__(
        self,
        model: TrainableModel,
        config: TrainConfig,
        *,
        total_steps: int,
        device: torch.device,
    ) -> None:
        """The process group must be initialized. `model` holds its weights on rank 0, and is sharded in
        place. It may be in host memory, from where it is moved layer by layer."""
        settings = config.backend
        assert isinstance(settings, AnyFsdp), "the kind that builds it"
        is_flat = isinstance(settings, Fsdp)
        if is_flat and any(recipe.num_experts for recipe in recipes(model.module).values()):
            raise ModelError(
                "train.backend=fsdp cannot train adapters of routed experts; set train.backend=fsdp2, or "
                "model.lora.targets to layers beside the experts, such as [q_proj, k_proj, v_proj, o_proj]"
            )
        if settings.cpu_offload:  # everything is in host memory already
            config = config.model_copy(update={"offload": OffloadConfig()})
        model.leave_gradients_to_autograd()
        self._weights, self._recipes = _weight_names(model), recipes(model.module)
        self._shapes = {name: p.shape for name, p in model.module.named_parameters()}
        whole = {name: tensor.detach() for name, tensor in _tensors_of(model.module)}
        mesh = _mesh(settings, device)
        computes_in = _use_float32_shards(model.module, is_flat=is_flat) if total_steps else None
        if computes_in is None and next(iter(whole.values())).dtype == torch.float32:
            # Gathered in this type: autocast would keep a converted copy of all weights for the backward
            # pass.
            computes_in = autocast_dtype(config, device)
        if computes_in or settings.param_dtype:
            for p in model.module.parameters():
                p.grad_dtype = None  # gradients stay in half precision until they are reduced
        self._dtypes = {name: tensor.dtype for name, tensor in whole.items()}
        self._net: nn.Module = Pass(model)
        if isinstance(settings, Fsdp2):
            _shard(self._net, settings, mesh, computes_in)
        else:
            assert isinstance(settings, Fsdp), "there are two kinds"
            self._net = _wrap(self._net, settings, mesh, device, computes_in)
        self._syncs_last_only = settings.sync_last_micro_batch_only
        self._is_sharded = mesh.size(1) > 1 and (not is_flat or settings.sharding != "none")
        self._shard_group = mesh.get_group("shard")
        self._starts = self._flat_starts() if is_flat and self._is_sharded else {}
        super().__init__(model, config, total_steps=total_steps, device=device)
        boxes = {name: self._boxes_of(name, tensor) for name, tensor in self._own_tensors()}
        self._take_from_first(whole, boxes)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer without master weights, which the shards are. FSDP's are flat, whatever the
        parameter."""
        tensors = _tensors_of(self._net)
        matrices = [x for name, x in tensors if len(self._shapes.get(_own_name(name), ())) >= 2]
        config = self._config.optimizer
        rates = peak_rates(self._model, config)
        return build_optimizer(self._model.module, config, rates, matrices=matrices)

    def _flat_starts(self) -> dict[str, int]:
        """Offset of this rank's part in each parameter: FSDP's shards are consecutive ranges of the flattened
        parameter."""
        sizes: list[dict[str, int]] = [{}] * dist.get_world_size(self._shard_group)
        mine = {_own_name(name): p.numel() for name, p in self._net.named_parameters()}
        dist.all_gather_object(sizes, mine, group=self._shard_group)
        before = sizes[: dist.get_rank(self._shard_group)]
        return {name: sum(size[name] for size in before) for name in mine}

    def iter_weights(self, *, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See TrainingBackend. FSDP2 gathers one tensor at a time, FSDP one layer."""
        made = self._recipes
        if not merged:
            made = {stored: Recipe((name,)) for name, stored in self._weights.items()}
        shards = dict(self._own_tensors())
        for layer, names in self._by_layer(made).items():
            gathered: AbstractContextManager[None] = nullcontext()
            if layer is not None:  # includes the layer's adapters
                gathered = FullyShardedDataParallel.summon_full_params(layer, recurse=False, writeback=False)
            with gathered:
                for name in names:
                    tensors = [self._gathered(shards[part], self._dtypes[part]) for part in made[name].parts]
                    yield name, made[name].weight(tensors) if dist.get_rank() == 0 else tensors[0]

    def _by_layer(self, made: Mapping[str, Recipe]) -> dict[FullyShardedDataParallel | None, list[str]]:
        """Names of the weights that FSDP gathers with each layer; with FSDP2 all under None."""
        layer_of: dict[str, FullyShardedDataParallel] = {}
        for prefix, module in self._net.named_modules():
            if isinstance(module, FullyShardedDataParallel):  # inner ones come later
                layer_of.update((_own_name(name), module) for name, _ in module.named_parameters(prefix))
        names: dict[FullyShardedDataParallel | None, list[str]] = {}
        for name, recipe in made.items():
            names.setdefault(layer_of.get(recipe.parts[0]), []).append(name)
        return names

    def _gathered(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole tensor as `dtype`. With FSDP the layer is gathered already; rank 0 gets a copy because
        FSDP frees the memory afterwards."""
        value: Any = tensor.detach()
        if isinstance(value, DTensor):
            return value.to(self._device, dtype).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        return value.to(dtype, copy=True) if dist.get_rank() == 0 else value

    def _move_weights(self, device: torch.device) -> None:
        """Move the shards to `device`, keeping the views that each FSDP version has of them valid."""
        self._let_go()
        for module in self._net.modules():
            if isinstance(module, FullyShardedDataParallel) and (handle := module._handle) is not None:
                handle.flat_param.data = moved(handle.flat_param.data, device)
                handle.flat_param_to(device)  # renews the views
                handle.flat_param._local_shard = handle.flat_param.data
        if isinstance(self._net, FullyShardedDataParallel):
            for buffer in self._net.buffers():
                buffer.data = moved(buffer.data, device)
        else:
            self._net._apply(partial(moved, device=device))

    def _weight_boxes(self) -> dict[str, Boxes]:
        shards = self._own_tensors()
        return {self._weights[name]: self._boxes_of(name, x) for name, x in shards if name in self._weights}

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, x) for n, x in self._own_tensors() if x.numel() or n not in self._starts)

    def _boxes_of(self, name: str, tensor: Tensor) -> Boxes:
        if name in self._starts and tensor.ndim == 1:
            return Boxes.of_range(tensor, self._shapes[name], self._starts[name])
        return Boxes.of(tensor)

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Sharded parameters and buffers under their names without FSDP's wrappers."""
        self._let_go()
        for name, tensor in _tensors_of(self._net):
            yield _own_name(name), tensor

    def _let_go(self) -> None:
        """Free parameters that stay gathered between passes."""
        for module in self._net.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
            elif isinstance(module, FullyShardedDataParallel):
                _free_gathered(module)

    def _observe(self, head: ValueHead, returns: NDArray[np.floating]) -> None:
        """Update this rank's part of the head; the update is elementwise."""
        self._let_go()
        head.observe(returns)

    def _forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        return self._net(batch, outputs)

    def _synced(self, *, is_last: bool) -> AbstractContextManager[None]:
        travels = is_last or not self._syncs_last_only
        if isinstance(self._net, FullyShardedDataParallel):
            return nullcontext() if travels else self._net.no_sync()
        self._net.set_requires_gradient_sync(travels)  # pyright: ignore[reportCallIssue]
        return nullcontext()

    def _grad_norm(self) -> Tensor:
        local = [g.to_local() if isinstance(g, DTensor) else g for g in self._gradients()]
        return self._norm_over(self._shard_group if self._is_sharded else None, local)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _own_name(name: str) -> str:
    """Name of a parameter without the prefixes of FSDP's wrappers and of `Pass`."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("model.")


def _weight_names(model: TrainableModel) -> dict[str, str]:
    """Name in the module -> checkpoint name, in checkpoint order."""
    names = {id(tensor): name for name, tensor in _tensors_of(model.module)}
    return {names[id(tensor)]: name for name, tensor in model.named_weights()}


def _free_gathered(module: FullyShardedDataParallel) -> None:
    """Free the parameters that FSDP gathered for a forward pass without gradients, which it would keep using
    even after the shards have been written to."""
    handle = module._handle
    if handle is None or not handle.uses_sharded_strategy:
        return
    if hasattr(handle.flat_param, "_full_param_padded"):
        handle.reshard(free_unsharded_flat_param=True)


def _mesh(config: AnyFsdp, device: torch.device) -> DeviceMesh:
    """Device mesh of ranks: replicas x shards."""
    world = dist.get_world_size()
    size = config.size
    if size is None and config.sharding == "hybrid":
        nodes: list[str] = [""] * world
        dist.all_gather_object(nodes, socket.gethostname())
        size = min(Counter(nodes).values())
    if config.sharding == "none":
        size = 1
    shards = min(size or world, world)
    return init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=("replicate", "shard"))


def _layers(module: nn.Module) -> set[type[nn.Module]]:
    """Classes of the model's repeated layers: the members of its non-empty `nn.ModuleList`s."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return {type(layer) for layers in lists for layer in layers}


def _use_float32_shards(module: nn.Module, *, is_flat: bool) -> torch.dtype | None:
    """Replace the memory of trainable half-precision parameters by uninitialized float32 memory, and return
    their former type. FSDP's flat parameters have a single type, so with FSDP frozen parameters are converted
    too."""
    halves = [p for p in module.parameters() if p.dtype in HALF]
    had = next((p.dtype for p in halves if p.requires_grad), None)
    for p in halves if had else []:
        if p.requires_grad or is_flat:
            p.data = torch.empty_like(p, dtype=torch.float32)
    return had


def _shard(net: nn.Module, config: Fsdp2, mesh: DeviceMesh, computes_in: torch.dtype | None) -> None:
    options: dict[str, Any] = {
        "mesh": mesh["shard"] if mesh.size(0) == 1 else mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[config.param_dtype] or computes_in,
            reduce_dtype=_DTYPES[config.reduce_dtype] or torch.float32,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=config.pin_memory)
        if config.cpu_offload
        else OffloadPolicy(),
    }
    reshards = False if config.sharding == "grad_op" else config.reshard_after_forward
    kinds = _layers(net)
    for module in list(net.modules()):
        if type(module) in kinds:
            fully_shard(module, reshard_after_forward=reshards, **options)
    fully_shard(net, reshard_after_forward=False, **options)


def _wrap(
    net: nn.Module,
    config: Fsdp,
    mesh: DeviceMesh,
    device: torch.device,
    computes_in: torch.dtype | None,
) -> FullyShardedDataParallel:
    precision = None
    if config.param_dtype or config.reduce_dtype or config.buffer_dtype or computes_in:
        precision = MixedPrecision(
            param_dtype=_DTYPES[config.param_dtype] or computes_in,
            reduce_dtype=_DTYPES[config.reduce_dtype] or torch.float32,
            buffer_dtype=_DTYPES[config.buffer_dtype],
        )
    is_hybrid = 1 < mesh.size(1) < mesh.size()
    strategy = (_HYBRIDS if is_hybrid else _SHARDINGS)[config.sharding]
    if mesh.size(1) == 1:  # replicas alone
        strategy = ShardingStrategy.NO_SHARD
    with warnings.catch_warnings():
        # With frozen weights FSDP warns that it allocates gradients for them too.
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
        return FullyShardedDataParallel(
            net,
            device_mesh=mesh if is_hybrid else init_device_mesh(device.type, (mesh.size(),)),
            sharding_strategy=strategy,
            cpu_offload=CPUOffload(offload_params=True) if config.cpu_offload else None,
            auto_wrap_policy=ModuleWrapPolicy(_layers(net)),
            backward_prefetch=_PREFETCHES[config.backward_prefetch],
            mixed_precision=precision,
            device_id=device if device.type == "cuda" else torch.device("cpu"),
            forward_prefetch=config.forward_prefetch,
            limit_all_gathers=config.limit_all_gathers,
            use_orig_params=True,  # optimizer groups and LoRA need separate parameters
        )
