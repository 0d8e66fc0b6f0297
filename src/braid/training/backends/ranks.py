"""What the backends that share a model out among data-parallel ranks have in common: rows, passes, reports and state.

All ranks make the same number of passes through the model, since each pass gathers its layers together: a rank that has run
out of rows passes a spare one, which counts for nothing. Gradients are averaged over ranks by what wraps the model, and a
step's loss is a sum over them, so each rank's share is multiplied by their number.

With `train.sequence_parallel` ranks next to each other have the same rows, and a piece each of every packed sequence.
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
"""Parameter -> moment -> its whole shape and type."""


class PartBackend(SingleBackend):
    """One rank's part of a model and its optimizer: how all ranks together give their state, save it, and take one over.

    A subclass says which boxes of which tensors it has, by the names and shapes that one process has.
    """

    def state(self) -> dict[str, Any]:
        """See TrainingBackend: whole tensors, on rank 0; the others return what is small."""
        with self._awake():
            mine = self._sharded_state()
            parts: list[Any] = [None] * dist.get_world_size()
            dist.gather_object(mine, parts if dist.get_rank() == 0 else None)
            return joined(parts) if dist.get_rank() == 0 else {**mine, "weights": {}, "optimizer": None}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over whole tensors by their checkpoint names: of each its part."""
        with self._awake():
            for name, boxes in self._weight_boxes().items():
                if name in weights:
                    boxes.take(weights[name])
            self._spread()

    def load(self, state: dict[str, Any]) -> None:
        """See TrainingBackend. Every rank is given the whole state."""
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
        """This rank's parts of the weights, by their checkpoint names; of all weights, also those of which it has nothing."""

    @abstractmethod
    def _moment_boxes(self, like: WholeMoments) -> dict[str, dict[str, Boxes]]:
        """Room in the optimizer for this rank's parts of moments like these, and for no others."""

    @torch.no_grad()
    def _take_from_first(self, whole: Mapping[str, Tensor], boxes: Mapping[str, Boxes]) -> None:
        """Write into this rank's boxes what rank 0 has as `whole` under their names; the others' say shapes and types only."""
        described = {(name, tensor.dtype, tensor.shape) for name, tensor in whole.items()}
        first: list[Any] = [described]
        dist.broadcast_object_list(first, device=self._device)
        if unlike := described ^ first[0]:
            raise ModelError(
                f"rank {dist.get_rank()} makes other weights of the model's config than rank 0 has read from its files, "
                f"among them {min(name for name, *_ in unlike)}; set model.low_memory_load=false, so that every rank reads them"
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
        """Make what passes use of the parts that were written, where that is something else."""

    def _awake(self) -> AbstractContextManager[None]:
        """With the parts where they can be read and written, whatever `to_host` has moved."""
        return nullcontext()


class RankBackend(PartBackend):
    """One rank's part of a model. See training.group.ShardedBackend; all calls are made on all ranks together."""

    def __init__(
        self, model: TrainableModel, config: TrainConfig, *, total_steps: int, device: torch.device
    ) -> None:
        """The process group must be up."""
        self._sequence = _sequence_group(config.sequence_parallel)
        self._num_sharers = config.sequence_parallel
        self._spare: PackedBatch | None = None
        self._num_left = 0
        super().__init__(model, config, total_steps=total_steps, device=device)

    def data_place(self) -> tuple[int, int]:
        """See ShardedBackend: every rank has rows of its own, or those that share sequences have the same."""
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
        """Of the rows of all ranks, each once."""
        mine = super()._returns(rows) if rows and self._is_first_sharer else np.zeros(0, np.float32)
        parts: list[NDArray[np.floating]] = [mine] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return np.concatenate(parts)

    def _flops_of(self, rows: Sequence[Row]) -> Flops:
        whole = super()._flops_of(rows)
        return Flops(whole.forward // self._num_sharers, whole.training // self._num_sharers)

    def _batches(self, rows: Sequence[Row], weights: Sequence[float]) -> Iterator[PackedBatch]:
        own = self._micro_batches(rows) if rows else []
        self._num_left = self._most(len(own))
        for indices in own:
            yield self._pack([rows[i] for i in indices], [weights[i] for i in indices])
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
            self._go_back(share * (scale * dist.get_world_size()))
        if self._is_first_sharer:
            running.add(share.detach(), diagnostics)
        else:
            running.add(torch.zeros_like(share), diagnostics.emptied())

    def _go_back(self, loss: Tensor) -> None:
        loss.backward()

    @abstractmethod
    def _synced(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around a pass; gradients have to travel at the latest in the last one."""

    @property
    def _is_first_sharer(self) -> bool:
        """Of the ranks that have the same rows one counts them."""
        return dist.get_rank() % self._num_sharers == 0

    def _report(self, running: Running, num_tokens: int, limits: Mapping[str, float]) -> StepReport:
        running.merge(_all_sum, _all_max)
        own = num_tokens if self._is_first_sharer else 0
        count = _all_sum(torch.tensor(own, dtype=torch.int64, device=self._device))
        return super()._report(running, int(count), limits)

    def _most(self, number: int) -> int:
        """The greatest of the ranks' numbers."""
        return int(_all_max(torch.tensor(number, dtype=torch.int64, device=self._device)))


class Pass(nn.Module):
    """The whole way from a batch to its outputs as one module, so that what wraps it sees where it begins and ends."""

    def __init__(
        self, model: TrainableModel, around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Every pass is made within `around()`."""
        super().__init__()
        self.model = model.module
        self._trainable = [model]  # in a list, so that it is no submodule
        self._around = around

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        with self._around():
            return self._trainable[0].forward(batch, outputs)


def _sequence_group(size: int) -> SequenceGroup | None:
    """That of this rank, of `size` ranks next to each other; None for one alone. A call of all ranks."""
    if size == 1:
        return None
    world = dist.get_world_size()
    assert world % size == 0, "the plan gives a role a multiple of train.sequence_parallel"
    mine, _ = dist.new_subgroups(size)
    assert isinstance(mine, dist.ProcessGroup), "this rank is in one"
    return SequenceGroup(mine)


def _all_sum(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.SUM)
    return tensor


def _all_max(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor
