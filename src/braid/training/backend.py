"""The protocol of a training backend: one model, its optimizer, and how rows become forward and backward passes.

Backends differ in nothing a user can see but speed and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braid.models.base import Output
from braid.models.batch import PackedBatch
from braid.models.flops import Flops
from braid.types import Row


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Metrics of one micro-batch, in a form that merges over micro-batches: scalar tensors on its device.

    `means` are name -> (sum, count), `maxima` name -> the greatest (-inf over nothing).
    """

    means: dict[str, tuple[Tensor, Tensor]]
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def emptied(self) -> Diagnostics:
        """The same metrics of nothing."""
        return Diagnostics(
            {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in self.means.items()},
            {name: torch.full_like(x, -math.inf) for name, x in self.maxima.items()},
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as the backend needs it.

    `compute(outputs, batch)` returns the micro-batch's share of the step's loss, a scalar, already weighted with
    `batch.weights` (so that the shares of all micro-batches add up to the loss), and metrics. `outputs` names what the
    model must compute for it. `limits` bounds the means of metrics over the whole step: when one is above its limit, the
    step is not taken.
    """

    outputs: frozenset[Output]
    compute: Callable[[dict[str, Tensor], PackedBatch], tuple[Tensor, Diagnostics]]
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did. `metrics` are name -> (sum, count), `maxima` name -> greatest. `grad_norm` is before
    clipping. `is_skipped` when loss or gradient was not finite, `is_stopped` when both were finite and a limit of the loss
    was passed: then weights and optimizer are as before. `is_overflow` when such a skip was the doing of `loss_scale`, which is
    lower from then on."""

    loss: float
    grad_norm: float
    lr: float
    is_skipped: bool
    is_stopped: bool
    num_tokens: int
    is_overflow: bool = False
    loss_scale: float | None = None
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Memory of one model: what it holds all the time, and `gradients` while a step runs. `is_on_device` is False for
    weights that wait in host memory."""

    weights: int
    gradients: int
    optimizer: int
    is_on_device: bool


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written of its state (training.shards), or why it could not. `state` is what has no tensors, `files` are
    name -> {bytes, sha256} of this rank's files."""

    state: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: OSError | None = None


@dataclass(slots=True)
class Work:
    """Operations done by a model (models.flops), and the seconds that they took."""

    infer_flops: int = 0
    infer_s: float = 0.0
    train_flops: int = 0
    train_s: float = 0.0


class TrainingBackend(Protocol):
    """One model and its optimizer."""

    def infer(self, rows: Sequence[Row], outputs: frozenset[Output]) -> list[dict[str, NDArray[np.float32]]]:
        """Forward only: for each row, an array [len(row)] per output. No gradients, micro-batched by tokens."""
        ...

    def train(self, rows: Sequence[Row], weights: Sequence[float], loss: Loss) -> StepReport:
        """One optimizer step over all `rows`. `weights` [B] is what each position of a row counts in the loss
        (algorithms.aggregate.row_weights, counted over the whole step)."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under their checkpoint names, in order."""
        ...

    def to_host(self) -> None:
        """Give the device to others: what `offload` names moves to host memory. Then only `named_weights`, `state` and
        `load` are used until `to_device`."""
        ...

    def to_device(self) -> None:
        """Bring back what `to_host` moved."""
        ...

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        """Operations of one pass over rows of these lengths (models.flops)."""
        ...

    def take_work(self) -> Work:
        """What was done since the last call; nothing is counted without `count_flops`."""
        ...

    def held_bytes(self) -> HeldBytes:
        """What the model takes."""
        ...

    def state(self) -> dict[str, Any]:
        """Weights, optimizer, step counters: all that `load` needs to go on to the bit. Tensors and plain data.

        The tensors are the live ones: write or copy them before the next step."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Take over copies of what `state` gave. Raises CheckpointError when it is of another model."""
        ...
