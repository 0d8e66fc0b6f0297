"""The protocol of a training backend: one model, its optimizer, and forward and backward passes over rows.

Backends differ only in speed and memory, not in results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from braid.models.base import Output
from braid.models.batch import PackedBatch
from braid.models.flops import Flops
from braid.models.logprobs import TiledLogits
from braid.types import Row


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Metrics of one micro-batch, in a form that merges over micro-batches: scalar tensors on its device.

    `means` are name -> (sum, count), `maxima` name -> the greatest (-inf over nothing). `weight` is the sum
    of the weights that the loss gave to its positions, `checks` the sums of checks.sampler.TOKEN_SUMS, where
    they are measured.
    """

    means: dict[str, tuple[Tensor, Tensor]]
    maxima: dict[str, Tensor] = field(default_factory=dict)
    weight: Tensor | None = None
    checks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as the backend needs it.

    `compute(outputs, batch)` returns the micro-batch's share of the step's loss, a scalar, already weighted
    with `batch.weights` (so that the shares of all micro-batches add up to the loss), and metrics. `outputs`
    names what the model must compute for it. `limits` bounds the means of metrics over the whole step: when
    one is above its limit, the step is not taken. With `whole_trajectories` all rows of a trajectory must be
    in one micro-batch, however long they are together. With `is_checked` the checks measure more of the step:
    its tokens, and whether it changes the weights.
    """

    outputs: frozenset[Output]
    compute: Callable[[dict[str, Tensor], PackedBatch], tuple[Tensor, Diagnostics]]
    limits: Mapping[str, float] = field(default_factory=dict)
    whole_trajectories: bool = False
    is_checked: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of one optimizer step. `metrics` are name -> (sum, count), `maxima` name -> maximum. `grad_norm`
    is before clipping. `is_skipped`: loss or gradient was not finite; `is_stopped`: both were finite, but a
    limit of the loss was exceeded. In both cases weights and optimizer are unchanged. `is_overflow`: the step
    was skipped because the scaled gradients overflowed, and `loss_scale` has been lowered. `checks` are sums
    for the checks of the loop: `loss_weight`, which the loss gave to all positions, and where they are
    measured those of checks.sampler.TOKEN_SUMS, and `probed_weights` and `changed_weights` of this rank."""

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
    checks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Memory of one model in bytes: what it always holds, and `gradients` during a step. `is_on_device` is
    False while the weights are offloaded to host memory."""

    weights: int
    gradients: int
    optimizer: int
    is_on_device: bool


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written of its state (training.shards), or the error. `state` is the part without
    tensors, `files` name -> {bytes, sha256} of this rank's files."""

    state: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: OSError | None = None


@dataclass(slots=True)
class Work:
    """Floating-point operations of a model (models.flops), and their duration in seconds."""

    infer_flops: int = 0
    infer_s: float = 0.0
    train_flops: int = 0
    train_s: float = 0.0


class TrainingBackend(Protocol):
    """One model and its optimizer, or the part of one rank, whose calls are then collective.

    A rank with fewer micro-batches than another runs `spare`, a row, with zero weight.
    """

    def data_place(self) -> tuple[int, int]:
        """(index, number) of the rank's share of the rows. Ranks that work on the same rows (of one tensor,
        pipeline, context or sequence parallel group) have the same share, and each returns the results."""
        ...

    def infer(
        self, rows: Sequence[Row], outputs: frozenset[Output], spare: Row
    ) -> list[dict[Output, NDArray[Any]]]:
        """Forward only: for each row, an array [len(row)] per output, or [len(row), L, K] of its experts. No
        gradients, micro-batched by tokens."""
        ...

    def train(self, rows: Sequence[Row], weights: Sequence[float], loss: Loss, spare: Row) -> StepReport:
        """One optimizer step over the rows of all ranks. `weights` [B] is the loss weight of each position of
        a row (algorithms.aggregate.row_weights, computed over the whole step). Every rank reports the whole
        step."""
        ...

    def use_reference(self, logits: Callable[[PackedBatch], TiledLogits]) -> None:
        """Measure divergences of a policy from `logits` of the reference in the same process."""
        ...

    def logits(self, batch: PackedBatch) -> TiledLogits:
        """Logits that predict the policy's tokens, for the divergence of another model. They stay valid
        until the weights change."""
        ...

    def full_weights(self, merged: bool = False) -> dict[str, Tensor]:
        """Checkpoint name -> whole tensor in host memory, on rank 0; empty on the others. In a single process
        these are the trained tensors themselves. `merged` as in iter_weights."""
        ...

    def iter_weights(self, *, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and whole tensors on their device, gathered in parts so that no rank holds all of
        them: for weights.sender.join_send. All ranks must exhaust the iterator; only rank 0's tensors are
        valid. With `merged` adapters are added to the weights that they belong to."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], *, heads_differ: bool = False) -> None:
        """Load whole tensors by their checkpoint names, all of the model's. Raises ModelError if some are
        missing, unknown or of another shape. `heads_differ`: a critic takes the weights of a policy
        (models.base.check_fit)."""
        ...

    def state(self) -> dict[str, Any]:
        """Weights, optimizer and step counters, as tensors and plain data: everything that `load` needs to
        continue bit for bit. Whole tensors on rank 0; the other ranks return only the small parts. The
        tensors may be the live ones: write or copy them before the next step."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Restore copies of what `state` returned on rank 0; every rank gets the whole. Raises
        CheckpointError if it belongs to another model."""
        ...

    def save(self, folder: str) -> Written:
        """Write this rank's part of the state into `folder` (training.shards); a single process may return it
        instead."""
        ...

    def restore(self, saved: dict[str, Any], folder: str) -> None:
        """Restore what ranks of any layout have saved: the state returned by rank 0, and the folder. Raises
        CheckpointError if it belongs to another model."""
        ...

    def to_host(self) -> None:
        """Free the device for other roles: what `offload` names moves to host memory. Only `full_weights`,
        `state` and `load` may be called until `to_device`."""
        ...

    def to_device(self) -> None:
        """Undo `to_host`."""
        ...

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        """Operations of one pass over rows of these lengths (models.flops)."""
        ...

    def take_work(self) -> Work:
        """Operations since the last call; zero without `count_flops`."""
        ...

    def held_bytes(self) -> HeldBytes:
        """Memory of this rank's part of the model."""
        ...
