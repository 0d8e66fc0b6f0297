"""Training in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from braid.training.backends.base import Backend

if TYPE_CHECKING:
    import torch

    from braid.config.train import TrainConfig
    from braid.models.base import TrainableModel

    from .backend import SingleBackend


class Single(Backend):
    """One process, with the whole model on one device."""

    kind: Literal["single"] = "single"  # pyright: ignore[reportIncompatibleVariableOverride]
    """One process, with the whole model on one device."""

    is_sharded = False

    def build(
        self, model: TrainableModel, train: TrainConfig, *, total_steps: int, device: torch.device
    ) -> SingleBackend:
        from .backend import SingleBackend

        return SingleBackend(model, train, total_steps=total_steps, device=device)
