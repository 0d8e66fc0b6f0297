"""Dynamic loss scaling, which keeps small fp16 gradients from underflowing (Micikevicius et al. 2018,
arXiv 1710.03740)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from braid.config.backends import GradScalerConfig

_BACKOFF, _GROWTH, _MIN_SCALE = 0.5, 2.0, 1.0


class LossScale:
    """Factor on the loss before the backward pass.

    It is halved by a step whose scaled gradients overflow, and doubled after `growth_interval` finite steps
    in a row.
    """

    def __init__(self, config: GradScalerConfig) -> None:
        self.value = config.init_scale
        self._floor = min(_MIN_SCALE, config.init_scale)
        self._growth_interval = config.growth_interval
        self._num_finite = 0

    @property
    def can_shrink(self) -> bool:
        """Whether the scale can be lowered; an overflow at its minimum is the model's fault."""
        return self.value > self._floor

    def update(self, *, is_overflow: bool) -> None:
        """Update the scale after a step."""
        if is_overflow:
            self.value, self._num_finite = max(self._floor, self.value * _BACKOFF), 0
            return
        self._num_finite += 1
        if self._num_finite == self._growth_interval:
            self.value, self._num_finite = self.value * _GROWTH, 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "num_finite": self._num_finite}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value, self._num_finite = state["value"], state["num_finite"]
