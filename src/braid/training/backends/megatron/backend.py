"""Megatron-core backend of one rank.

Megatron owns the layers, the pipeline schedule, the gradient buffers and the optimizer; the rest is that of
RankBackend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from numpy.typing import NDArray
from torch import Tensor

from braid.config.backends import GradScalerConfig
from braid.config.train import TrainConfig
from braid.errors import ModelError
from braid.models.base import Output, TrainableModel
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.value import ValueModel
from braid.models.value_head import ValueHead
from braid.training.backend import HeldBytes, Loss
from braid.training.backends.ranks import RankBackend
from braid.training.backends.single.backend import Running, autocast_dtype
from braid.training.loss_scale import LossScale
from braid.training.offload import HOST, move_states, move_weights, moved, num_bytes
from braid.training.shards import Boxes, WholeMoments

from .checks import check_model
from .kind import settings_of
from .model import Decoder, layer_options, padded_vocab, text_config
from .names import Names, Shard, bridge_of
from .ranks import groups, join


class MegatronBackend(RankBackend):
    """See training.backend.TrainingBackend; all calls are collective."""

    def __init__(
        self, model: TrainableModel, config: TrainConfig, *, total_steps: int, device: torch.device
    ) -> None:
        """The process group must be initialized. `model` holds its weights on rank 0 in host memory, and is
        moved to the meta device. Raises TrainingError or ModelError if it cannot be partitioned as
        `config.backend` says."""
        if not isinstance(model, CausalLM | ValueModel) or getattr(model, "has_adapters", False):
            raise ModelError(
                "train.backend=megatron supports only full training of language models and critics on "
                "them; set train.backend to fsdp2, fsdp or single"
            )
        sizes = text_config(model)
        megatron = settings_of(config)
        check_model(sizes, megatron)
        join(megatron)
        dtype = next(model.module.parameters()).dtype
        options = layer_options(sizes, config, dtype, autocast_dtype(config, device))
        bridge = bridge_of(sizes, padded_vocab(sizes.vocab_size), **options)
        self._layers = bridge.config
        stages = [stage.to(device) for stage in _stages(model, self._layers)]
        for stage in stages:
            stage.requires_grad_(total_steps > 0)
        weights = {name: tensor.detach() for name, tensor in model.named_weights()}
        self._names = Names(bridge, stages, weights, _head_names(model))
        self._stages = [_wrapped(stage, index, config, self._layers) for index, stage in enumerate(stages)]
        self._dtype, self._is_offloaded = dtype, False
        super().__init__(model, config, total_steps=total_steps, device=device)
        self._num_sharers = dist.get_world_size() // groups.get_data_parallel_world_size()
        self._take_from_first(weights, self._weight_boxes())
        model.module.to("meta")
        self._layers.finalize_model_grads_func = _finalize
        if megatron.overlap_grad_reduce:
            self._layers.no_sync_func = _per_stage([stage.no_sync for stage in self._stages])
            self._layers.grad_sync_func = _per_stage([stage.start_grad_sync for stage in self._stages])
        self._scale = _loss_scale(config, dtype)

    def _build_optimizer(self) -> Any:
        """Build Megatron's optimizer instead of torch's."""
        config, megatron = self._config.optimizer, settings_of(self._config)
        settings = OptimizerConfig(
            optimizer="adam" if config.kind == "adamw" else "sgd",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            sgd_momentum=0.0,
            bf16=self._dtype != torch.float32,  # selects Megatron's optimizer with float32 master weights
            params_dtype=self._dtype,
            clip_grad=0.0,  # clipped in _update
            use_distributed_optimizer=self._stages[0].ddp_config.use_distributed_optimizer,
            overlap_param_gather=megatron.overlap_param_gather,
        )
        overrides: dict[Any, Any] = dict(get_standard_config_overrides(settings))
        if config.value_lr is not None:
            overrides[ParamKey(name="*value_head.*")] = {"max_lr": config.value_lr}
        optimizer = get_megatron_optimizer(settings, self._stages, overrides, use_gloo_process_groups=False)
        for group in optimizer.param_groups:
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
            group["scale"] = group["max_lr"] / config.lr
        return optimizer

    def data_place(self) -> tuple[int, int]:
        """See TrainingBackend: all ranks of a model replica have the same rows."""
        return groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()

    @property
    def _counts_rows(self) -> bool:
        is_first = groups.get_tensor_model_parallel_rank() == groups.get_context_parallel_rank() == 0
        return is_first and groups.is_pipeline_last_stage()

    def _outputs(
        self, batches: Iterable[PackedBatch], outputs: frozenset[Output]
    ) -> Iterator[tuple[PackedBatch, dict[str, Tensor]]]:
        names, batches = sorted(outputs), list(batches)
        passed = self._run(batches, outputs, partial(_outputs_of, names), forward_only=True)
        for index, batch in enumerate(batches):
            flat = self._from_last(passed[index] if passed else None, (len(names), batch.num_positions))
            yield batch, dict(zip(names, flat, strict=True))

    def _accumulate(
        self,
        batches: Iterable[PackedBatch],
        num_passes: int,  # Megatron synchronizes gradients by itself
        loss: Loss,
        running: Running,
    ) -> None:
        def scheduled(batch: PackedBatch, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, None]:
            share, diagnostics = loss.compute(outputs, batch)
            return self._counted(share, diagnostics, batch, running), _no_tokens(), None

        self._run(list(batches), loss.outputs, scheduled, forward_only=False)

    def _run(
        self,
        batches: Sequence[PackedBatch],
        outputs: frozenset[Output],
        loss: Callable[[PackedBatch, dict[str, Tensor]], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run all passes with Megatron's schedule. `loss` returns (loss for the backward pass, number of
        tokens to average over, which is unused here, data to keep). Returns the data of each batch on the
        last stage, and an empty list on the others."""

        def step(data: Iterator[PackedBatch], stage: Any) -> tuple[Any, Callable[[Any], Any]]:
            batch = next(data)
            with self._autocast():
                passed = stage(batch, outputs)
            return passed, partial(loss, batch)

        for stage in self._stages:  # there is no dropout; activations are recomputed in train mode only
            stage.train(not forward_only)
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=_per_stage([iter(batches) for _ in self._stages]),
            model=_per_stage(self._stages),
            num_microbatches=len(batches),
            seq_length=1,  # unused: with variable_seq_lengths stages send the shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _num_passes(self, num_micro_batches: int) -> int:
        """See SingleBackend. With the interleaved schedule, a multiple of the pipeline-parallel size."""
        multiple = groups.get_pipeline_model_parallel_world_size() if len(self._stages) > 1 else 1
        return -(-max(super()._num_passes(num_micro_batches), 1) // multiple) * multiple

    def _from_last(self, values: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Broadcast `values` of the last pipeline stage to all stages."""
        if groups.get_pipeline_model_parallel_world_size() == 1:
            assert values is not None, "a single stage is the last"
            return values
        if values is None:
            values = torch.empty(shape, dtype=torch.float32, device=self._device)
        values = values.contiguous()
        last = groups.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, last, groups.get_pipeline_model_parallel_group())
        return values

    @property
    def _gradient_factor(self) -> float:
        return 1.0  # Megatron sums gradients over ranks

    def _probes(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return []

    def _grad_norm(self) -> Tensor:
        self._optimizer.prepare_grads()
        return torch.tensor(float(self._optimizer.get_grad_norm()), device=self._device)

    def _scale_gradients(self, factor: float) -> None:
        for stage in self._stages:
            stage.scale_gradients(factor)

    def _step(self) -> None:
        self._optimizer.prepare_grads()
        self._optimizer.step_with_ready_grads()

    def _rest_optimizer(self) -> None:
        for optimizer in self._inner():
            if not isinstance(optimizer, torch.optim.AdamW):
                _count_in_groups(optimizer)
        super()._rest_optimizer()

    def _move_optimizer(self, device: torch.device) -> None:
        for optimizer in self._inner():
            move_states(optimizer, device)

    def _drop_gradients(self) -> None:
        for stage in self._stages:
            stage.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _inner(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers inside Megatron's chained optimizer; a part without weights on this rank has
        none."""
        if self._optimizer is None:
            return []
        return [part.optimizer for part in self._optimizer.chained_optimizers if part.optimizer is not None]

    def iter_weights(self, *, merged: bool = False) -> Iterator[tuple[str, Tensor]]:  # no adapters here
        """See TrainingBackend. Gathers one tensor at a time, on rank 0 only."""
        with self._awake():
            self._gather_parameters()
            yield from self._names.gathered()

    def _observe(self, head: ValueHead, returns: NDArray[np.floating]) -> None:  # uses the last stage's head
        """Update the head's statistics and rescale its weights: the model's weights, and their float32 master
        weights if they are half precision (float32 weights are trained in place)."""
        trained = {shard.parameter: part.values for shard, part in self._parts(with_copies=False)}
        for stage in self._stages:
            if (value_head := stage.module.value_head) is None:
                continue
            weight, bias = (trained.get(p, p.detach()[:0]) for p in (value_head.weight, value_head.bias))
            value_head.observe(returns, [] if self._dtype == torch.float32 else [(weight, bias)])

    def _sharded_state(self) -> dict[str, Any]:
        return {**super()._sharded_state(), "weights": self._weight_boxes(with_copies=False)}

    def _weight_boxes(self, *, with_copies: bool = True) -> dict[str, Boxes]:
        parts: dict[str, list[tuple[list[int], Tensor]]] = {name: [] for name in self._names.shapes}
        for shard, part in self._parts(with_copies=with_copies):
            for name, offsets, box in self._names.boxes(shard, part.values, part.start):
                parts[name].append((offsets, box))
        for name, buffer in self._names.buffers.items():
            parts[name].append(([0] * buffer.ndim, buffer))
        stored = self._names.dtypes
        trained = self._dtype if self._optimizer is not None else None
        dtypes = {n: torch.float32 if stored[n] == trained else stored[n] for n in parts}
        return {name: Boxes(self._names.shapes[name], dtypes[name], boxes) for name, boxes in parts.items()}

    def _moment_boxes(self, like: WholeMoments) -> dict[str, dict[str, Boxes]]:
        for inner in self._inner():
            inner.state.clear()
            for group in inner.param_groups:
                group.pop("step", None)
        for shard, part in self._parts(with_copies=True):
            name = shard.pieces[0].name
            for key, (shape, dtype) in like.get(name, {}).items():
                values = part.values if shape else part.values.new_zeros(())
                part.state[key] = torch.zeros_like(values, dtype=dtype)
        return self._moments(with_copies=True)

    def _moments(self, *, with_copies: bool = False) -> dict[str, dict[str, Boxes]]:
        """Optimizer moments per weight. A scalar of a fused parameter, such as its step count, is repeated
        for each of the weights that are fused into it."""
        parts: dict[tuple[str, str], list[tuple[list[int], Tensor]]] = {}
        for shard, part in self._parts(with_copies=with_copies):
            counted = {} if part.num_steps is None else {"step": torch.tensor(float(part.num_steps))}
            for key, value in {**counted, **part.state}.items():
                if value.ndim:
                    boxes = self._names.boxes(shard, value, part.start)
                else:
                    boxes = ((piece.name, [], value) for piece in shard.pieces)
                for name, offsets, box in boxes:
                    parts.setdefault((name, key), []).append((offsets, box))
        moments: dict[str, dict[str, Boxes]] = {}
        for (name, key), boxes in parts.items():
            shape = self._names.shapes[name] if boxes[0][0] else ()
            moments.setdefault(name, {})[key] = Boxes(shape, boxes[0][1].dtype, boxes)
        return moments

    def _parts(self, *, with_copies: bool) -> Iterator[tuple[Shard, _Part]]:
        """The parts of this rank's parameters that it trains, or whole parameters if the model is not
        trained. Copies of tied weights on other stages are sharded differently over data-parallel ranks, and
        are never saved."""
        for shard in self._names.shards:
            if shard.is_copy and not with_copies:
                continue
            if self._optimizer is None:
                yield shard, _Part(shard.parameter.detach(), 0, {})
            elif part := _Part.of(self._optimizer.chained_optimizers[-1 if shard.is_expert else 0], shard):
                yield shard, part

    def _spread(self) -> None:
        if self._optimizer is not None:
            for part in self._optimizer.chained_optimizers:
                if not isinstance(part, FP32Optimizer):  # FP32Optimizer updates the parameters in place
                    part._copy_main_params_to_model_params()
            self._gather_parameters()

    def _gather_parameters(self) -> None:
        """All-gather parameters from the data-parallel ranks that each train a part."""
        for stage in self._stages:
            if stage.ddp_config.use_distributed_optimizer:
                stage.start_param_sync(force_sync=True)

    def to_host(self) -> None:
        if self._device.type == "cpu":
            return
        if self._config.offload.gradients:
            for stage in self._stages:
                stage.offload_grad_buffers()
        super().to_host()
        self._is_offloaded = self._leaves_weights

    def to_device(self) -> None:
        if self._device.type == "cpu":
            return
        if self._config.offload.gradients:
            for stage in self._stages:
                stage.restore_grad_buffers()
        super().to_device()
        self._is_offloaded = False

    def _move_weights(self, device: torch.device) -> None:
        for stage in self._stages:
            if not (stage.ddp_config.use_distributed_optimizer and stage.buffers):
                move_weights(stage.module, device)
                continue
            for buffer in chain(stage.buffers, stage.expert_parallel_buffers):
                move = buffer.offload_to_cpu if device == HOST else buffer.reload_from_cpu
                move(move_params=True, move_grads=False)
        for master in self._float32_copies():
            master.data = moved(master.data, device)

    def _float32_copies(self) -> Iterator[Tensor]:
        """This rank's parts of Megatron's float32 master weights."""
        for part in self._optimizer.chained_optimizers if self._optimizer is not None else ():
            of_shards = getattr(part, "shard_fp32_from_float16_groups", None)
            groups_of = getattr(part, "fp32_from_float16_groups", ()) if of_shards is None else of_shards
            yield from (master for group in groups_of for master in group if master is not None)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        is_away = self._is_offloaded
        if is_away:
            self._move_weights(self._device)
        yield
        if is_away:
            self._move_weights(HOST)

    def held_bytes(self) -> HeldBytes:
        weights = [shard.parameter for shard in self._names.shards]
        buffers = (chain(stage.buffers, stage.expert_parallel_buffers) for stage in self._stages)
        return HeldBytes(
            weights=sum(p.nbytes for p in weights),
            gradients=sum(buffer.grad_data.nbytes for of_stage in buffers for buffer in of_stage),
            optimizer=sum(map(num_bytes, self._inner())) + sum(x.nbytes for x in self._float32_copies()),
            is_on_device=not self._is_offloaded,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a parameter that this rank's optimizer updates: values in the trained precision, offset of
    the first one among the parameter's elements, and optimizer state. `num_steps` is set where the optimizer
    counts steps outside of the state."""

    values: Tensor
    start: int
    state: dict[str, Tensor]
    num_steps: int | None = None

    @classmethod
    def of(cls, optimizer: Any, shard: Shard) -> _Part | None:
        """This rank's part, or None if other data-parallel ranks hold all of the parameter."""
        parameter: Any = shard.parameter
        inner, start = optimizer.optimizer, 0
        if not isinstance(optimizer, DistributedOptimizer):
            main = getattr(parameter, "main_param", None)
            main = parameter if main is None else main
        elif parameter not in optimizer.model_param_group_index_map:
            return None
        else:
            group, place = optimizer.model_param_group_index_map[parameter]
            main = inner.param_groups[group]["params"][place]
            start = optimizer._get_model_param_range_map(parameter)["param"].start
        return cls(main.detach(), start, inner.state[main], _num_steps(inner))


def _num_steps(optimizer: torch.optim.Optimizer) -> int | None:
    """Steps counted in the parameter groups, as the FusedAdam of Transformer Engine and Apex does. Empty
    groups do not count."""
    counts = (group["step"] for group in optimizer.param_groups if group["params"] and "step" in group)
    return next(map(int, counts), None)


def _count_in_groups(optimizer: torch.optim.Optimizer) -> None:
    """Move restored step counts from the state to the parameter groups, where FusedAdam has them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if "step" in (state := optimizer.state.get(parameter, {})):
                group["step"] = int(state.pop("step"))


def _head_names(model: CausalLM | ValueModel) -> dict[str, str]:
    """Names of the value head's weights in the last stage -> names in a checkpoint."""
    if isinstance(model, CausalLM):
        return {}
    stored = {id(tensor): name for name, tensor in model.named_weights()}
    tensors = model.value_head.state_dict(keep_vars=True)
    return {f"value_head.{name}": stored[id(tensor)] for name, tensor in tensors.items()}


def _stages(model: CausalLM | ValueModel, layers: Any) -> list[Any]:
    """Build this rank's stages: one, or several non-adjacent ones with the interleaved schedule."""
    number = layers.virtual_pipeline_model_parallel_size
    stages = [Decoder(model, layers, index) for index in (range(number) if number else [None])]
    for stage in stages:
        for parameter in stage.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return stages


def _wrapped(stage: Decoder, index: int, config: TrainConfig, layers: Any) -> Any:
    """Wrap a stage in Megatron's DistributedDataParallel, which owns the gradient buffers."""
    megatron = settings_of(config)
    shards = megatron.distributed_optimizer and config.optimizer.kind == "adamw"
    return DistributedDataParallel(
        layers,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=shards,
            overlap_grad_reduce=megatron.overlap_grad_reduce,
            overlap_param_gather=megatron.overlap_param_gather and shards,
            bucket_size=megatron.ddp_bucket_size,
        ),
        stage,
        disable_bucketing=index > 0,
    )


def _finalize(stages: list[Any], num_tokens: Tensor | None, **options: Any) -> None:  # noqa: ARG001  # gradients are not divided by it
    """Reduce gradients over ranks with Megatron, as sums."""
    finalize_model_grads(stages, None, **options)


def _per_stage(values: list[Any]) -> Any:
    """One value, or a list of one per interleaved stage, as Megatron's schedules expect."""
    return values if len(values) > 1 else values[0]


def _outputs_of(
    names: Sequence[str],
    batch: PackedBatch,  # noqa: ARG001  # the signature of a loss
    outputs: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Stand-in for the loss in inference passes; keeps the outputs [names, T]."""
    kept = torch.stack([outputs[name].float() for name in names])
    return kept.new_zeros(()), _no_tokens(), kept


def _no_tokens() -> Tensor:
    return torch.zeros((), dtype=torch.int)


def _loss_scale(config: TrainConfig, dtype: torch.dtype) -> LossScale | None:
    """The loss scale of fp16, with Megatron's own window; None in other precisions."""
    if config.autocast != "fp16" and dtype != torch.float16:
        return None
    scaler, window = config.grad_scaler or GradScalerConfig(), settings_of(config).dynamic_loss_scale_window
    return LossScale(scaler.model_copy(update={"growth_interval": window}))
