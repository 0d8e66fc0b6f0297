"""Base class of backends that shard a model over ranks: which rows a rank has, and collective state.

All ranks run the same number of passes because each pass gathers layers collectively: a rank that is out of
rows runs a spare row with zero weight. The model wrapper (FSDP, DeepSpeed) averages gradients over ranks,
while a step's loss is a sum over them, so each rank's loss is multiplied by the number of ranks.

A vision tower is sharded like every other part: a trained one has gradients and moments, most of its memory.
Its layers are then gathered, and their gradients reduced, by all ranks or none, so a rank whose micro-batch
has no image runs the tower on a blank one, whose features are multiplied by 0. So it does with a frozen
tower, which is gathered too. Where no rank has an image in a whole forward-only call, none runs its tower.

With `train.sequence_parallel` neighboring ranks have the same rows, and each holds a slice of every packed
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from braid.config.train import TrainConfig
from braid.errors import ModelError
from braid.models.base import Output, TrainableModel
from braid.models.batch import PackedBatch
from braid.models.sequence_parallel import SequenceGroup
from braid.training.shards import Boxes, joined
from braid.types import Row

from .single.backend import SingleBackend

T = TypeVar("T")


class RankBackend(SingleBackend):
    """One rank's part of a model. See training.backend.TrainingBackend; all calls are collective."""

    def __init__(
        self, model: TrainableModel, config: TrainConfig, *, total_steps: int, device: torch.device
    ) -> None:
        """The process group must be initialized."""
        self._sequence = _sequence_group(config.sequence_parallel)
        self._num_sharers = config.sequence_parallel
        super().__init__(model, config, total_steps=total_steps, device=device)

    def data_place(self) -> tuple[int, int]:
        """See TrainingBackend: one share per rank, or per sequence-parallel group."""
        return dist.get_rank() // self._num_sharers, dist.get_world_size() // self._num_sharers

    @property
    def _counts_rows(self) -> bool:
        return dist.get_rank() % self._num_sharers == 0

    @property
    def _gradient_factor(self) -> float:
        return float(dist.get_world_size())

    def _over_ranks(self, value: T) -> list[T]:
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def _pack(self, rows: Sequence[Row], weights: Sequence[float] | None) -> PackedBatch:
        return replace(super()._pack(rows, weights), sequence=self._sequence)

    def _go_back(self, loss: Tensor) -> None:
        (loss * dist.get_world_size()).backward()

    def _norm_over(self, group: dist.ProcessGroup | None, parts: list[Tensor]) -> Tensor:
        """Global L2 norm of `parts`, which may be in host memory, and of those of the group's other ranks, if
        there is a group. On the compute device, where NCCL needs it."""
        square = torch.nn.utils.get_total_norm(parts).double().square().to(self._device)
        if group is not None:
            dist.all_reduce(square, group=group)
        return square.sqrt().float()

    def full_weights(self, merged: bool = False) -> dict[str, Tensor]:
        weights = self.iter_weights(merged=merged)
        return {name: x.to("cpu", copy=True) for name, x in weights if dist.get_rank() == 0}

    def state(self) -> dict[str, Any]:
        with self._awake():
            mine = self._sharded_state()
            parts: list[Any] = [None] * dist.get_world_size()
            dist.gather_object(mine, parts if dist.get_rank() == 0 else None)
            return joined(parts) if dist.get_rank() == 0 else {**mine, "weights": {}, "optimizer": None}

    @torch.no_grad()
    def _take_from_first(self, whole: Mapping[str, Tensor], boxes: Mapping[str, Boxes]) -> None:
        """Broadcast rank 0's `whole` tensors into all ranks' boxes by name. On other ranks `whole` gives only
        shapes and types."""
        described = {(name, tensor.dtype, tensor.shape) for name, tensor in whole.items()}
        first: list[Any] = [described]
        dist.broadcast_object_list(first, device=self._device)
        if unlike := described ^ first[0]:
            raise ModelError(
                f"the weights that rank {dist.get_rank()} builds from the model's config differ from those "
                f"that rank 0 read from its files, for example {min(name for name, *_ in unlike)}; set "
                "model.low_memory_load=false, so that every rank reads the files"
            )
        for name, tensor in whole.items():
            if dist.get_rank() == 0:
                sent = tensor.to(self._device).contiguous()
            else:
                sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            dist.broadcast(sent, 0)
            if name in boxes:
                boxes[name].take(sent)
        self._spread()


class Pass(nn.Module):
    """The whole pass from a batch to its outputs as one module, which gives wrappers a single forward call to
    hook."""

    def __init__(
        self, model: TrainableModel, around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Every forward call runs in the context `around()`."""
        super().__init__()
        self.model = model.module
        self._trainable = [model]  # in a list so that it is not registered as a submodule
        self._around = around

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        with self._around():
            return self._trainable[0].forward(batch, outputs)


def _sequence_group(size: int) -> SequenceGroup | None:
    """This rank's sequence-parallel group of `size` neighboring ranks, or None for size 1. Collective."""
    if size == 1:
        return None
    world = dist.get_world_size()
    assert world % size == 0, "the world size is a multiple of train.sequence_parallel"
    mine, _ = dist.new_subgroups(size)
    assert isinstance(mine, dist.ProcessGroup), "this rank is in one"
    return SequenceGroup(mine)
