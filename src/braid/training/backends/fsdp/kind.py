"""Settings of PyTorch's FSDP and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from braid.config.backends import DType
from braid.sections import Unused
from braid.training.backends.base import Sharded, Shares

if TYPE_CHECKING:
    import torch

    from braid.config.schema import RunConfig
    from braid.config.train import TrainConfig
    from braid.models.base import TrainableModel
    from braid.plan import Plan

    from .backend import FsdpBackend


class AnyFsdp(Sharded):
    """What FSDP and FSDP2 have in common."""

    sharding: Literal["full", "grad_op", "hybrid", "none"] = "full"
    """full: shard parameters, gradients and optimizer state. grad_op: shard gradients and optimizer state
    (weights stay gathered from forward to backward). hybrid: shard everything within a machine, replicate
    across machines. none: shard nothing."""
    size: PositiveInt | None = None
    """Devices per shard group, with replicas across groups; null for all devices."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    sync_last_micro_batch_only: bool = False
    """Reduce gradients only after the last micro-batch of a step instead of after each: less communication,
    but every rank holds the gradients of the whole model."""
    param_dtype: DType | None = None
    """Dtype of gathered weights and computation. null: train.autocast's for fp32 models, else model.dtype."""
    reduce_dtype: DType | None = None
    """Dtype of gradient reduction; fp32 when null."""

    gathers_weights = True
    parallel_sizes = ("size",)
    unused_while = (("sharding", "none", "size"),)

    def build(
        self, model: TrainableModel, train: TrainConfig, *, total_steps: int, device: torch.device
    ) -> FsdpBackend:
        from .backend import FsdpBackend

        return FsdpBackend(model, train, total_steps=total_steps, device=device)

    def shares(self, train: TrainConfig, count: int) -> Shares:
        part, tokens = 1.0 / self.shard_size(count), 1.0 / train.sequence_parallel
        if self.sharding == "none":
            return Shares(activations=tokens)
        if self.cpu_offload:
            return Shares(0.0, 0.0, 0.0, tokens, gathered_layers=2)
        gradients = 1.0 if self.sync_last_micro_batch_only else part
        stays_gathered = self.sharding == "grad_op"
        return Shares(part, gradients, part, tokens, gathered_layers=None if stays_gathered else 2)

    def parameter_dtype(self) -> DType | None:
        return self.param_dtype

    def shard_size(self, count: int) -> int:
        return self.size or count

    def divisors(self, train: TrainConfig) -> Iterator[tuple[str, int, str]]:
        yield from super().divisors(train)
        if self.size is not None:
            yield "backend.size", self.size, f"a shard group needs {self.size} devices"

    def unused_in(self, config: RunConfig, plan: Plan, train: TrainConfig) -> Unused:
        yield from super().unused_in(config, plan, train)
        if self.cpu_offload:
            why = "@.backend.cpu_offload already keeps everything in host memory"
            yield why, "@.offload.{weights,optimizer}"


class Fsdp(AnyFsdp):
    """PyTorch FSDP."""

    kind: Literal["fsdp"] = "fsdp"  # pyright: ignore[reportIncompatibleVariableOverride]
    """PyTorch FSDP."""
    forward_prefetch: bool = False
    """Gather the next layer's weights during the current layer's forward pass."""
    backward_prefetch: Literal["pre", "post", "off"] = "off"
    """When the next layer's weights are gathered in the backward pass: before (pre) or after (post) the
    current layer's gradients are computed; off for no prefetch."""
    limit_all_gathers: bool = False
    """Limit the number of all-gathers in flight to bound memory."""
    buffer_dtype: DType | None = None
    """Dtype of buffers, such as rotary frequencies; unchanged when null."""

    def master_bytes(self, trained: int, held: int, width: int) -> int:
        """Its shards are fp32: those of frozen weights too, as flat parameters have a single type."""
        return (4 - width) * held

    def problems(self, config: RunConfig, train: TrainConfig, at: str) -> Iterator[tuple[str, str]]:
        if at == "train" and config.model.lora is not None and (self.sharding == "none" or self.size == 1):
            why = "fsdp cannot train adapters without sharding the frozen weights"
            fix = "set train.backend={kind: fsdp2, size: 1}, or train.backend.sharding=full"
            yield f"{at}.backend.sharding", f"{why}; {fix}"


class Fsdp2(AnyFsdp):
    """PyTorch FSDP2."""

    kind: Literal["fsdp2"] = "fsdp2"  # pyright: ignore[reportIncompatibleVariableOverride]
    """PyTorch FSDP2."""
    pin_memory: bool = False
    """Use pinned host memory for cpu_offload."""
    reshard_after_forward: bool | PositiveInt = True
    """Free the gathered weights after the forward pass; a number reshards them to that many devices.
    grad_op keeps them gathered."""

    parallel_sizes = (*AnyFsdp.parallel_sizes, "reshard_after_forward")
    unused_while = (
        *AnyFsdp.unused_while,
        ("cpu_offload", False, "pin_memory"),
        ("sharding", "grad_op", "reshard_after_forward"),
    )

    def master_bytes(self, trained: int, held: int, width: int) -> int:
        """Its shards of trained weights are fp32."""
        return (4 - width) * trained

    def divisors(self, train: TrainConfig) -> Iterator[tuple[str, int, str]]:
        yield from super().divisors(train)
        reshard = self.reshard_after_forward
        if self.size is None and type(reshard) is int:
            key = "backend.reshard_after_forward"
            yield key, reshard, f"weights are resharded over {reshard} devices"
