"""Training on several ranks by PyTorch's FSDP and FSDP2.

Every rank holds a shard of weights, gradients and optimizer, and runs the rows it is given. All ranks make the same number of
passes through the model, since each pass gathers its layers together: a rank that has run out of rows passes a spare one,
which counts for nothing. FSDP averages gradients over ranks and a step's loss is a sum over them, so each rank's share
is multiplied by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from braid.config.backends import FsdpConfig
from braid.config.train import TrainConfig
from braid.models.base import Output, TrainableModel, copy_weights
from braid.models.batch import PackedBatch
from braid.training.backend import Loss, StepReport
from braid.training.packing import pack
from braid.types import Row

from .single import Running, SingleBackend

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
_SHARDINGS = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.FULL_SHARD,  # over the shards that `size` names; with all of them it is full
    "none": ShardingStrategy.NO_SHARD,
}
_PREFETCHES = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "off": None}


class FsdpBackend(SingleBackend):
    """One rank's part of a model. See training.group.ShardedBackend; all calls are made on all ranks together."""

    def __init__(
        self,
        model: TrainableModel,
        config: TrainConfig,
        *,
        total_steps: int,
        device: torch.device,
        kind: Literal["fsdp", "fsdp2"],
    ) -> None:
        """The process group must be up. `model` holds the same weights on every rank and is sharded in place."""
        model.leave_gradients_to_autograd()
        self._names = [name for name, _ in model.named_weights()]
        self._shapes = {name: p.shape for name, p in model.module.named_parameters()}
        mesh = _mesh(config.fsdp.size, device)
        self._pass = _Pass(model)
        self._net: nn.Module = self._pass
        if kind == "fsdp2":
            _shard(self._pass, config.fsdp, mesh)
        else:
            self._net = _wrap(self._pass, config.fsdp, mesh, device)
        self._is_sharded = mesh.size(1) > 1 and (kind == "fsdp2" or config.fsdp.sharding != "none")
        self._shard_group = mesh.get_group("shard")
        self._syncs_last_only = config.fsdp.sync_last_micro_batch_only
        self._spare: PackedBatch | None = None
        self._num_left = 0
        super().__init__(model, config, total_steps=total_steps, device=device)

    def data_place(self) -> tuple[int, int]:
        """See ShardedBackend: every rank has rows of its own."""
        return dist.get_rank(), dist.get_world_size()

    def infer(  # pyright: ignore[reportIncompatibleMethodOverride]  # ranks need a spare row
        self, rows: Sequence[Row], outputs: frozenset[Output], spare: Row
    ) -> list[dict[str, NDArray[np.float32]]]:
        """See ShardedBackend."""
        num_own = len(self._infer_batches(rows)) if rows else 0
        num_spare = self._most(num_own) - num_own  # agreed on before the first pass
        results = super().infer(rows, outputs) if rows else []
        batch = pack([spare], self._device, with_fields=False)
        with torch.no_grad(), self._autocast():
            for _ in range(num_spare):
                self._forward(batch, outputs)
        return results

    def train(  # pyright: ignore[reportIncompatibleMethodOverride]  # ranks need a spare row
        self, rows: Sequence[Row], weights: Sequence[float], loss: Loss, spare: Row
    ) -> StepReport:
        """See ShardedBackend. All ranks return the same report."""
        self._spare = pack([spare], self._device, weights=[0.0])
        try:
            return super().train(rows, weights, loss)
        finally:
            self._spare = None

    def full_weights(self) -> dict[str, Tensor]:
        """Checkpoint name -> whole tensor in host memory, on rank 0; empty on the others."""
        if isinstance(self._net, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self._net, writeback=False):
                whole = {name: tensor.detach().cpu().clone() for name, tensor in self._model.named_weights()}
            return whole if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = get_model_state_dict(self._net, options=options)
        return {name: state[_PREFIX + name] for name in self._names} if state else {}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over whole tensors by their checkpoint names."""
        if isinstance(self._net, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self._net):
                whole = self._net.named_parameters()
                copy_weights(weights, ((_checkpoint_name(name), p) for name, p in whole))
            return
        named: dict[str, Any] = {_PREFIX + name: tensor for name, tensor in weights.items()}
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(self._net, named, options=options)

    def state(self) -> dict[str, Any]:
        """See TrainingBackend: whole tensors, on rank 0; the others return what is small."""
        weights = self.full_weights()
        optimizer = None
        if self._optimizer is not None:
            whole = self._whole_optimizer(self._optimizer)
            optimizer = {name.removeprefix(_PREFIX): value for name, value in whole.items()}
        return {
            "weights": weights,
            "optimizer": optimizer,
            "num_steps": self._num_steps,
            "skipped_in_row": self._skipped_in_row,
            "loss_scale": None if self._scale is None else self._scale.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """See TrainingBackend. Every rank is given the whole state."""
        self.load_weights(state["weights"])
        if self._optimizer is not None and state["optimizer"]:
            self._load_optimizer(state["optimizer"], self._optimizer)
        if self._scale is not None and state["loss_scale"] is not None:
            self._scale.load(state["loss_scale"])
        self._num_steps, self._skipped_in_row = state["num_steps"], state["skipped_in_row"]

    def _whole_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if not optimizer.state:  # torch would take a step to have some, and count it
            return {}
        if not isinstance(self._net, FullyShardedDataParallel):
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            whole: dict[str, Any] = get_optimizer_state_dict(self._net, optimizer, options=options)
            return whole.get("state", {})
        own = {
            name: dict(optimizer.state[p]) for name, p in self._net.named_parameters() if p in optimizer.state
        }
        shards = self._gathered({_PREFIX + _checkpoint_name(name): state for name, state in own.items()})
        if dist.get_rank() != 0:
            return {}
        pieces: dict[str, list[dict[str, Tensor]]] = {}
        for shard in shards:  # a rank that has nothing of a parameter has no state of it
            for name, state in shard.items():
                pieces.setdefault(name, []).append(state)
        return {
            name: {key: self._joined(name, [state[key] for state in states]) for key in states[0]}
            for name, states in pieces.items()
        }

    def _load_optimizer(self, states: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        named = {_PREFIX + name: value for name, value in states.items()}
        if not isinstance(self._net, FullyShardedDataParallel):
            options = StateDictOptions(full_state_dict=True)
            like: dict[str, Any] = get_optimizer_state_dict(self._net, optimizer, options=options)
            set_optimizer_state_dict(self._net, optimizer, {**like, "state": named}, options=options)
            return
        own = {_PREFIX + _checkpoint_name(name): p for name, p in self._net.named_parameters()}
        sizes = self._gathered({name: p.numel() for name, p in own.items()})
        rank = dist.get_rank(self._shard_group)
        for name, state in named.items():
            start = sum(size[name] for size in sizes[:rank]) if self._is_sharded else 0
            p = own[name]
            optimizer.state[p] = {
                key: value.clone()
                if value.ndim == 0
                else value.flatten()[start : start + p.numel()].clone().view_as(p)
                for key, value in state.items()
            }

    def _gathered(self, mine: Any) -> list[Any]:
        """What each rank of the shard group has; of one rank where nothing is sharded."""
        if not self._is_sharded:
            return [mine]
        parts: list[Any] = [None] * dist.get_world_size(self._shard_group)
        dist.all_gather_object(parts, mine, group=self._shard_group)
        return parts

    def _joined(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """FSDP's shards of a parameter are flat pieces of it, one after the other."""
        if shards[0].ndim == 0:
            return shards[0]
        return torch.cat([shard.flatten() for shard in shards]).view(self._shapes[name.removeprefix(_PREFIX)])

    def _forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        return self._net(batch, outputs)

    def _batches(self, rows: Sequence[Row], weights: Sequence[float]) -> Iterator[PackedBatch]:
        own = self._micro_batches(rows) if rows else []
        self._num_left = self._most(len(own))
        for indices in own:
            yield pack([rows[i] for i in indices], self._device, weights=[weights[i] for i in indices])
        assert self._spare is not None, "train() keeps it while a step runs"
        for _ in range(self._num_left):
            yield self._spare

    def _learn(self, batch: PackedBatch, loss: Loss, running: Running) -> None:
        self._num_left -= 1
        with self._synced(is_last=self._num_left == 0):
            with self._autocast():
                outputs = self._forward(batch, loss.outputs)
            share, diagnostics = loss.compute(outputs, batch)
            if batch is self._spare:
                share, diagnostics = share * 0.0, diagnostics.emptied()
            scale = 1.0 if self._scale is None else self._scale.value
            (share * (scale * dist.get_world_size())).backward()
        running.add(share.detach(), diagnostics)

    def _synced(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients travel in this pass only when they have to."""
        travels = is_last or not self._syncs_last_only
        if isinstance(self._net, FullyShardedDataParallel):
            return nullcontext() if travels else self._net.no_sync()
        self._net.set_requires_gradient_sync(travels)  # pyright: ignore[reportCallIssue]
        return nullcontext()

    def _report(self, running: Running, num_tokens: int, limits: Mapping[str, float]) -> StepReport:
        running.merge(_all_sum, _all_max)
        count = torch.tensor(num_tokens, dtype=torch.int64, device=self._device)
        return super()._report(running, int(_all_sum(count)), limits)

    def _grad_norm(self) -> Tensor:
        local = [g.to_local() if isinstance(g, DTensor) else g for g in self._gradients()]
        square = torch.nn.utils.get_total_norm(local).double().square()
        if self._is_sharded:
            dist.all_reduce(square, group=self._shard_group)
        return square.sqrt().float()

    def _most(self, number: int) -> int:
        """The greatest of the ranks' numbers."""
        return int(_all_max(torch.tensor(number, dtype=torch.int64, device=self._device)))


_PREFIX = "model."


def _checkpoint_name(name: str) -> str:
    """Of a parameter inside FSDP's wrappers."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix(_PREFIX)


class _Pass(nn.Module):
    """The whole way from a batch to its outputs as one module, so that FSDP sees where it begins and ends."""

    def __init__(self, model: TrainableModel) -> None:
        super().__init__()
        self.model = model.module
        self._trainable = [model]  # in a list, so that it is no submodule

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        return self._trainable[0].forward(batch, outputs)


def _mesh(size: int | None, device: torch.device) -> DeviceMesh:
    """Ranks as replicas x shards."""
    world = dist.get_world_size()
    shards = min(size or world, world)
    return init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=("replicate", "shard"))


def _layers(module: nn.Module) -> set[type[nn.Module]]:
    """The classes of the model's repeated layers: what `nn.ModuleList`s of more than one hold."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return {type(layer) for layers in lists for layer in layers}


def _shard(net: nn.Module, config: FsdpConfig, mesh: DeviceMesh) -> None:
    options: dict[str, Any] = {
        "mesh": mesh["shard"] if mesh.size(0) == 1 else mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[config.param_dtype], reduce_dtype=_DTYPES[config.reduce_dtype]
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=config.pin_memory)
        if config.cpu_offload
        else OffloadPolicy(),
    }
    kinds = _layers(net)
    for module in list(net.modules()):
        if type(module) in kinds:
            fully_shard(module, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(net, reshard_after_forward=False, **options)


def _wrap(
    net: nn.Module, config: FsdpConfig, mesh: DeviceMesh, device: torch.device
) -> FullyShardedDataParallel:
    precision = None
    if config.param_dtype or config.reduce_dtype or config.buffer_dtype:
        precision = MixedPrecision(
            param_dtype=_DTYPES[config.param_dtype],
            reduce_dtype=_DTYPES[config.reduce_dtype],
            buffer_dtype=_DTYPES[config.buffer_dtype or config.param_dtype],
        )
    is_hybrid = 1 < mesh.size(1) < mesh.size()
    strategy = ShardingStrategy.HYBRID_SHARD if is_hybrid else _SHARDINGS[config.sharding]
    if mesh.size(1) == 1:  # replicas alone
        strategy = ShardingStrategy.NO_SHARD
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
        use_orig_params=True,  # the optimizer's groups and LoRA need each parameter apart
    )


def _all_sum(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.SUM)
    return tensor


def _all_max(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor
