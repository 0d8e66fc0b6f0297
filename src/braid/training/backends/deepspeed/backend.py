"""DeepSpeed ZeRO-3 backend: weights, gradients and optimizer states are sharded, and weights gathered module
by module.

A rank's part of a parameter is a range of its elements, zero-padded on the last rank. ZeRO concatenates the
parts of an optimizer group in one flat tensor, which braid's optimizer updates: for half-precision weights a
float32 copy, which is also what checkpoints hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from braid.config.backends import OffloadConfig
from braid.config.train import TrainConfig
from braid.errors import TrainingError
from braid.models.base import Output, TrainableModel
from braid.models.batch import PackedBatch
from braid.models.lora import recipes
from braid.models.value_head import ValueHead
from braid.training.backend import HeldBytes
from braid.training.backends.ranks import Pass, RankBackend
from braid.training.offload import HOST, moved, num_bytes, release_memory
from braid.training.optimizer import build_optimizer, peak_rates
from braid.training.shards import Boxes, WholeMoments

from .checks import check_images, check_layers
from .kind import DeepSpeed

_BUCKET = 2**26
"""Number of gradient elements reduced together."""


class DeepSpeedBackend(RankBackend):
    """Trains with DeepSpeed ZeRO-3: every rank holds a part of each parameter."""

    def __init__(
        self, model: TrainableModel, config: TrainConfig, *, total_steps: int, device: torch.device
    ) -> None:
        """The process group must be initialized. `model` holds its weights on rank 0, and is sharded in
        place. It may be in host memory, from where it is moved tensor by tensor. Raises TrainingError if
        deepspeed is not installed, and ModelError for a model that checks.py refuses."""
        check_layers(model.module)
        check_images(model)
        package = _package(device)
        options = config.backend
        assert isinstance(options, DeepSpeed), "the kind that builds it"
        if options.cpu_offload:  # everything is in host memory already
            config = config.model_copy(update={"offload": OffloadConfig()})
        model.leave_gradients_to_autograd()
        self._names: dict[Any, str] = {p: name for name, p in model.module.named_parameters()}
        self._is_in_host_memory = options.cpu_offload
        self._parked: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        super().__init__(model, config, total_steps=total_steps, device=device)
        settings = _settings(model.module, options, device)
        net = Pass(model, super()._autocast)
        former = package.utils.groups._get_zero_param_intra_parallel_group()  # one per process
        package.zero.Init(
            net, config_dict_or_path=settings, zero_param_parallel_group=former
        )  # broadcasts rank 0's weights
        for buffer in net.buffers():
            buffer.data = buffer.data.to(device)
        self._engine: Any = package.initialize(model=net, optimizer=self._optimizer, config=settings)[0]
        self._zero: Any = self._engine.optimizer

    def _build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer without master weights: DeepSpeed keeps its own."""
        config = self._config.optimizer
        return build_optimizer(self._model.module, config, peak_rates(self._model, config))

    def _forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        return self._engine(batch, outputs)

    def _autocast(self) -> AbstractContextManager[None]:
        """No context here: autocast is entered inside DeepSpeed's module call, which would turn it off
        otherwise."""
        return nullcontext()

    def _synced(self, *, is_last: bool) -> AbstractContextManager[None]:
        """See SingleBackend. Gradients are reduced in every pass because each rank keeps only its parts."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def _go_back(self, loss: Tensor) -> None:
        self._engine.backward(loss * dist.get_world_size())

    def _gradients(self) -> list[Tensor]:
        groups: Mapping[int, Mapping[int, Tensor]] = self._zero.get_fp32_grad_partitions()
        return [gradient for group in groups.values() for gradient in group.values()]

    def _probes(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return []

    def _grad_norm(self) -> Tensor:
        return self._norm_over(dist.group.WORLD, self._gradients())

    def _step(self) -> None:
        self._engine.step()

    def _drop_gradients(self) -> None:
        self._zero.zero_grad()
        self._zero.averaged_gradients = {}
        if self._is_in_host_memory:
            self._zero.reset_cpu_buffers()

    def _observe(self, head: ValueHead, returns: NDArray[np.floating]) -> None:
        """Update the head's statistics with its parameters gathered temporarily."""
        params = list(head.parameters())
        names = {id(tensor): name for name, tensor in self._model.named_weights()}
        held = [p.data for p in params]
        for p in params:
            p.data = self._whole(p, self._part(p))
        head.observe(returns)
        changed = {names[id(p)]: p.data for p in params}
        for p, data in zip(params, held, strict=True):
            p.data = data
        self._take(self._weight_boxes(), changed)

    def iter_weights(self, *, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See TrainingBackend. Gathers one tensor at a time."""
        with self._awake():
            if not merged:
                yield from ((name, self._gathered(tensor)) for name, tensor in self._model.named_weights())
                return
            module = self._model.module
            tensors = module.state_dict(keep_vars=True)
            for name, recipe in recipes(module).items():
                yield name, recipe.weight([self._gathered(tensors[part]) for part in recipe.parts])

    def _gathered(self, tensor: Any) -> Tensor:
        return self._whole(tensor, tensor.ds_tensor) if _is_shared_out(tensor) else tensor.detach()

    def _weight_boxes(self) -> dict[str, Boxes]:
        return {
            name: self._range_of(tensor, self._part(tensor)) if _is_shared_out(tensor) else Boxes.of(tensor)
            for name, tensor in self._model.named_weights()
        }

    def _moments(self) -> dict[str, dict[str, Boxes]]:
        states = self._optimizer.state
        return {
            self._names[p]: self._moments_of(p, states[flat], start)
            for p, flat, start in self._in_groups()
            if flat in states
        }

    def _moment_boxes(self, like: WholeMoments) -> dict[str, dict[str, Boxes]]:
        states = self._optimizer.state
        states.clear()
        for p, flat, _ in self._in_groups():
            if flat not in states and self._names[p] in like:
                states[flat] = {
                    key: torch.zeros(flat.shape if shape else (), dtype=dtype, device=flat.device)
                    for key, (shape, dtype) in like[self._names[p]].items()
                }
        return {name: boxes for name, boxes in self._moments().items() if name in like}

    def _moments_of(self, p: Any, state: Mapping[str, Tensor], start: int) -> dict[str, Boxes]:
        """Boxes of a parameter's moments; the parameter starts at offset `start` in its group's flat tensor.
        Scalars of the group, such as the step count, are repeated for each parameter."""
        size = p.partition_numel()
        return {
            key: self._range_of(p, value[start : start + size]) if value.ndim else Boxes.of(value)
            for key, value in state.items()
        }

    def _in_groups(self) -> Iterator[tuple[Any, Tensor, int]]:
        """(parameter, flat tensor of its group, offset in it) of each trained parameter."""
        for p in self._names:
            if p.requires_grad:
                group, start, _ = self._zero.grad_position[self._zero.get_param_id(p)]
                yield p, self._zero.fp32_partitioned_groups_flat[group], start

    def _part(self, p: Any) -> Tensor:
        """This rank's part, in the precision in which it is trained."""
        if self._optimizer is None or not p.requires_grad:
            return p.ds_tensor
        group, start, size = self._zero.grad_position[self._zero.get_param_id(p)]
        return self._zero.fp32_partitioned_groups_flat[group].detach()[start : start + size]

    def _range_of(self, p: Any, part: Tensor) -> Boxes:
        start = dist.get_rank() * p.partition_numel()
        return Boxes.of_range(part[: max(0, p.ds_numel - start)], p.ds_shape, start)

    def _whole(self, p: Any, part: Tensor) -> Tensor:
        """All-gather the ranks' parts of a parameter."""
        shard = part.detach().to(self._device).contiguous()
        whole = shard.new_empty(dist.get_world_size() * len(shard))
        dist.all_gather_into_tensor(whole, shard)
        return whole[: p.ds_numel].view(p.ds_shape)

    def _spread(self) -> None:
        self._let_go()
        if self._optimizer is not None:
            flats = self._zero.fp32_partitioned_groups_flat
            for index, (used, master) in enumerate(
                zip(self._zero.fp16_partitioned_groups_flat, flats, strict=True)
            ):
                used.data.copy_(master.data)
                self._zero._unflatten_partitioned_parameters(index)
            self._zero.invalidate_secondary_tensor()

    def _let_go(self) -> None:
        """Partition the parameters that ZeRO keeps gathered between passes."""
        offload = self._zero if self._optimizer is None else self._zero.parameter_offload
        offload.partition_all_parameters()

    def to_host(self) -> None:
        """See TrainingBackend. Storages are resized to zero so that all views of them stay valid."""
        self._let_go()
        offload, zero = self._config.offload, self._zero
        if offload.weights:
            flats = [] if self._optimizer is None else zero.fp32_partitioned_groups_flat
            self._park([*(p.ds_tensor for p in self._names), *flats], is_kept=True)
        if offload.gradients and self._optimizer is not None:
            buckets = (bucket.buffer for bucket in zero.ipg_buckets.values())
            self._park([zero.grad_partitions_flat_buffer, *buckets], is_kept=False)
        release_memory()

    def _park(self, tensors: Iterable[Tensor], *, is_kept: bool) -> None:
        for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values():
            if size := storage.nbytes():
                held = _bytes_of(storage)
                copy = (moved(held, HOST) if held.is_cuda else held.clone()) if is_kept else None
                self._parked.append((storage, size, copy))
                storage.resize_(0)

    def to_device(self) -> None:
        for storage, size, copy in self._parked:
            storage.resize_(size)
            if copy is not None:
                _bytes_of(storage).copy_(copy)
            else:  # ZeRO never writes the padding of gradients, which counts in the norm
                _bytes_of(storage).zero_()
        self._parked = []

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Context with the weights on the device."""
        is_away = bool(self._parked)
        if is_away:
            self.to_device()
        yield
        if is_away:
            self.to_host()

    def held_bytes(self) -> HeldBytes:
        weights = [p.ds_tensor for p in self._names]
        gradients = 0
        if self._optimizer is not None:
            weights += self._zero.fp32_partitioned_groups_flat
            gradients = self._zero.grad_partitions_flat_buffer.nbytes
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in weights}
        waiting = sum(size for storage, size, _ in self._parked if storage._cdata in storages)
        return HeldBytes(
            weights=sum(storage.nbytes() for storage in storages.values()) + waiting,
            gradients=gradients,
            optimizer=num_bytes(self._optimizer),
            is_on_device=not waiting,
        )


def _package(device: torch.device) -> Any:
    """Import DeepSpeed with this rank's device selected."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    try:
        import deepspeed  # noqa: TID251  # the import takes seconds
    except ImportError as error:
        raise TrainingError(
            f"train.backend=deepspeed cannot import the package deepspeed ({error}); install it with "
            "DS_BUILD_OPS=0 pip install 'braid-rl[deepspeed]', or set train.backend=fsdp2"
        ) from error
    # On CPUs it would compile, for minutes, a communication backend that only inference uses; a killed build
    # leaves a lock on which all later builds wait.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(module: nn.Module, config: DeepSpeed, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's config. Its gradient clipping, learning rate schedule and loss scaling are off."""
    params = list(module.parameters())
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # its default is a norm of 1
        "bf16": {"enabled": params[0].dtype == torch.bfloat16},
        "fp16": {"enabled": params[0].dtype == torch.float16, "loss_scale": 1.0},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": config.stage,
            "zero_hpz_partition_size": config.hpz_partition_size,
            "reduce_bucket_size": min(
                sum(p.numel() for p in params), max(_BUCKET, *(p.numel() for p in params))
            ),
            "stage3_param_persistence_threshold": max((p.numel() for p in params if p.ndim < 2), default=0),
            **({"offload_param": host, "offload_optimizer": host} if config.cpu_offload else {}),
        },
    }


def _is_shared_out(tensor: Tensor) -> bool:
    """Whether ZeRO has partitioned the tensor: True for parameters, False for buffers."""
    return hasattr(tensor, "ds_tensor")


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
