"""Base classes of backends that shard a model over data-parallel ranks: rows, passes, reports and state.

All ranks run the same number of passes because each pass gathers layers collectively: a rank that is out of
rows runs a spare row with zero weight. The model wrapper (FSDP, DeepSpeed) averages gradients over ranks,
while a step's loss is a sum over them, so each rank's loss is multiplied by the number of ranks.

With `train.sequence_parallel` neighboring ranks have the same rows, and each holds a slice of every packed
sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from braid.config.train import TrainConfig
from braid.errors import ModelError
from braid.models.base import Output, TrainableModel
from braid.models.batch import PackedBatch
from braid.models.flops import Flops
from braid.models.sequence_parallel import SequenceGroup
from braid.training.backend import Loss, StepReport
from braid.training.shards import Boxes, Written, joined, read_into, stored_moments, write_state
from braid.types import Row

from .single import Running, SingleBackend

WholeMoments = Mapping[str, Mapping[str, tuple[torch.Size, torch.dtype]]]
"""Parameter -> moment -> (full shape, type)."""


class PartBackend(SingleBackend):
    """One rank's part of a model and its optimizer: collective state, save, load and restore.

    Subclasses define which boxes of which tensors the rank holds, under the names and shapes of the unsharded
    model.
    """

    def state(self) -> dict[str, Any]:
        """See TrainingBackend: whole tensors on rank 0; the other ranks return only the small parts."""
        with self._awake():
            mine = self._sharded_state()
            parts: list[Any] = [None] * dist.get_world_size()
            dist.gather_object(mine, parts if dist.get_rank() == 0 else None)
            return joined(parts) if dist.get_rank() == 0 else {**mine, "weights": {}, "optimizer": None}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts out of whole tensors, given by checkpoint name."""
        with self._awake():
            for name, boxes in self._weight_boxes().items():
                if name in weights:
                    boxes.take(weights[name])
            self._spread()

    def load(self, state: dict[str, Any]) -> None:
        """See TrainingBackend. Every rank gets the whole state."""
        self.load_weights(state["weights"])
        if self._trains:
            like = {
                name: {key: (value.shape, value.dtype) for key, value in moments.items()}
                for name, moments in (state["optimizer"] or {}).items()
            }
            for name, moments in self._moment_boxes(like).items():
                for key, boxes in moments.items():
                    boxes.take(state["optimizer"][name][key])
            self._rest_optimizer()
        self._load_counters(state)

    def save(self, folder: str) -> Written:
        """See ShardedBackend: each rank writes its part."""
        with self._awake():
            return write_state(Path(folder), self._sharded_state())

    def restore(self, saved: dict[str, Any], folder: str) -> None:
        """See ShardedBackend: each rank reads its part."""
        if "weights" in saved:
            self.load(saved)
            return
        with self._awake():
            optimizer = self._moment_boxes(stored_moments(Path(folder))) if self._trains else None
            read_into(Path(folder), {"weights": self._weight_boxes(), "optimizer": optimizer})
            self._spread()
        self._rest_optimizer()
        self._load_counters(saved)

    @property
    def _trains(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    @abstractmethod
    def _sharded_state(self) -> dict[str, Any]:
        """`state` with this rank's parts in place of whole tensors."""

    @abstractmethod
    def _weight_boxes(self) -> dict[str, Boxes]:
        """This rank's parts of the weights by checkpoint name. Covers all weights, including those with no
        part on this rank."""

    @abstractmethod
    def _moment_boxes(self, like: WholeMoments) -> dict[str, dict[str, Boxes]]:
        """Replace the optimizer state by zeros for this rank's parts of the moments in `like`, and return
        these parts."""

    @torch.no_grad()
    def _take_from_first(self, whole: Mapping[str, Tensor], boxes: Mapping[str, Boxes]) -> None:
        """Broadcast rank 0's `whole` tensors into all ranks' boxes by name. On other ranks `whole` gives only
        shapes and types."""
        described = {(name, tensor.dtype, tensor.shape) for name, tensor in whole.items()}
        first: list[Any] = [described]
        dist.broadcast_object_list(first, device=self._device)
        if unlike := described ^ first[0]:
            raise ModelError(
                f"the weights that rank {dist.get_rank()} builds from the model's config differ from those that rank 0 read from "
                f"its files, for example {min(name for name, *_ in unlike)}; set model.low_memory_load=false, so that every rank "
                "reads the files"
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

    def _spread(self) -> None:
        """Refresh the weights used in forward passes from the parts that were written, if the two differ."""

    def _awake(self) -> AbstractContextManager[None]:
        """Context in which the parts can be read and written, even after `to_host`."""
        return nullcontext()


class RankBackend(PartBackend):
    """One rank's part of a model. See training.group.ShardedBackend; all calls are collective."""

    def __init__(
        self, model: TrainableModel, config: TrainConfig, *, total_steps: int, device: torch.device
    ) -> None:
        """The process group must be initialized."""
        self._sequence = _sequence_group(config.sequence_parallel)
        self._num_sharers = config.sequence_parallel
        self._spare: PackedBatch | None = None
        self._num_left = 0
        super().__init__(model, config, total_steps=total_steps, device=device)

    def data_place(self) -> tuple[int, int]:
        """See ShardedBackend: one share per rank, or per sequence-parallel group."""
        return dist.get_rank() // self._num_sharers, dist.get_world_size() // self._num_sharers

    def infer(  # pyright: ignore[reportIncompatibleMethodOverride]  # ranks need a spare row
        self, rows: Sequence[Row], outputs: frozenset[Output], spare: Row
    ) -> list[dict[str, NDArray[np.float32]]]:
        """See ShardedBackend."""
        num_own = len(self._infer_batches(rows)) if rows else 0
        num_spare = self._most(num_own) - num_own  # agreed on before the first pass
        results = super().infer(rows, outputs) if rows else []
        batch = self._pack([spare], with_fields=False)
        with torch.no_grad(), self._autocast():
            for _ in range(num_spare):
                self._forward(batch, outputs)
        return results

    def train(  # pyright: ignore[reportIncompatibleMethodOverride]  # ranks need a spare row
        self, rows: Sequence[Row], weights: Sequence[float], loss: Loss, spare: Row
    ) -> StepReport:
        """See ShardedBackend. All ranks return the same report."""
        self._spare = self._pack([spare], weights=[0.0])
        try:
            return super().train(rows, weights, loss)
        finally:
            self._spare = None

    def _pack(
        self, rows: Sequence[Row], weights: Sequence[float] | None = None, *, with_fields: bool = True
    ) -> PackedBatch:
        return replace(super()._pack(rows, weights, with_fields=with_fields), sequence=self._sequence)

    def _returns(self, rows: Sequence[Row]) -> NDArray[np.floating]:
        """Returns of the rows of all ranks, each row once."""
        mine = super()._returns(rows) if rows and self._is_first_sharer else np.zeros(0, np.float32)
        parts: list[NDArray[np.floating]] = [mine] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return np.concatenate(parts)

    def _flops_of(self, rows: Sequence[Row]) -> Flops:
        whole = super()._flops_of(rows)
        return Flops(whole.forward // self._num_sharers, whole.training // self._num_sharers)

    def _batches(self, rows: Sequence[Row], weights: Sequence[float], loss: Loss) -> Iterator[PackedBatch]:
        own = self._micro_batches(rows, loss) if rows else []
        self._num_left = self._most(len(own))
        for indices in own:
            yield self._pack([rows[i] for i in indices], [weights[i] for i in indices])
        assert self._spare is not None, "set during a step of train()"
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
            self._go_back(share * (scale * dist.get_world_size()))
        if self._is_first_sharer:
            running.add(share.detach(), diagnostics)
        else:
            running.add(torch.zeros_like(share), diagnostics.emptied())

    def _go_back(self, loss: Tensor) -> None:
        loss.backward()

    def _norm_over(self, group: dist.ProcessGroup | None, parts: list[Tensor]) -> Tensor:
        """Global L2 norm of `parts`, which may be in host memory, and of those of the group's other ranks, if
        there is a group. On the compute device, where NCCL needs it."""
        square = torch.nn.utils.get_total_norm(parts).double().square().to(self._device)
        if group is not None:
            dist.all_reduce(square, group=group)
        return square.sqrt().float()

    @abstractmethod
    def _synced(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Context for one forward and backward pass. Gradients must be synchronized in the last pass at the
        latest."""

    @property
    def _is_first_sharer(self) -> bool:
        """Whether this rank counts the rows, among the ranks that share them."""
        return dist.get_rank() % self._num_sharers == 0

    def _report(self, running: Running, num_tokens: int, limits: Mapping[str, float]) -> StepReport:
        running.merge(_all_sum, _all_max)
        own = num_tokens if self._is_first_sharer else 0
        count = _all_sum(torch.tensor(own, dtype=torch.int64, device=self._device))
        return super()._report(running, int(count), limits)

    def _most(self, number: int) -> int:
        """Maximum of `number` over ranks."""
        return int(_all_max(torch.tensor(number, dtype=torch.int64, device=self._device)))


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


def _all_sum(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.SUM)
    return tensor


def _all_max(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor
