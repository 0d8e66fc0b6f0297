"""Settings of DeepSpeed ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from braid.sections import Unused
from braid.training.backends.base import Sharded, Shares

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from braid.config.schema import RunConfig
    from braid.config.train import TrainConfig
    from braid.models.base import TrainableModel
    from braid.plan import Plan

    from .backend import DeepSpeedBackend


class DeepSpeed(Sharded):
    """DeepSpeed ZeRO."""

    kind: Literal["deepspeed"] = "deepspeed"  # pyright: ignore[reportIncompatibleVariableOverride]
    """DeepSpeed ZeRO."""
    stage: Literal[3] = 3
    """ZeRO stage."""
    hpz_partition_size: PositiveInt = 1
    """Devices per secondary weight partition (ZeRO++ hpZ); 1 disables it."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory."""

    package = "deepspeed"
    parallel_sizes = ("hpz_partition_size",)
    frees_gradients = False

    def build(
        self, model: TrainableModel, train: TrainConfig, *, total_steps: int, device: torch.device
    ) -> DeepSpeedBackend:
        from .backend import DeepSpeedBackend

        return DeepSpeedBackend(model, train, total_steps=total_steps, device=device)

    def check_model(self, model: PreTrainedConfig) -> None:
        from .checks import check_architecture

        check_architecture(model)

    def shard_size(self, count: int) -> int:
        return self.hpz_partition_size

    def shares(self, train: TrainConfig, count: int) -> Shares:
        if self.cpu_offload:
            return Shares(0.0, 0.0, 0.0, 1.0 / train.sequence_parallel, gathered_layers=2)
        secondary = 1.0 / self.hpz_partition_size if self.hpz_partition_size > 1 else 0.0
        shares = super().shares(train, count)
        return shares._replace(weights=shares.weights + secondary)

    def divisors(self, train: TrainConfig) -> Iterator[tuple[str, int, str]]:
        yield from super().divisors(train)
        size = self.hpz_partition_size
        yield "backend.hpz_partition_size", size, f"a secondary partition needs {size} devices"

    def unused_in(self, config: RunConfig, plan: Plan, train: TrainConfig) -> Unused:
        yield from super().unused_in(config, plan, train)
        if self.cpu_offload:
            why = "@.backend.cpu_offload already keeps everything in host memory"
            yield why, "@.offload.{weights,gradients,optimizer}"
