"""Penalties for long responses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class LengthReward(RewardPart):
    """0 up to `start`, then linearly down to -1 at `end`, and -1 beyond."""

    kind: Literal["length"]
    """A penalty for long responses."""
    unit: Literal["tokens", "characters"] = "tokens"
    """tokens: tokens of the policy in all turns. characters: characters of the last turn, with its
    reasoning."""
    start: NonNegativeInt = 0
    """Length above which the penalty starts."""
    end: PositiveInt
    """Length at which the reward reaches -1."""

    is_deterministic: ClassVar[bool] = True

    @model_validator(mode="after")
    def _start_before_end(self) -> LengthReward:
        if self.start >= self.end:
            raise ValueError(f"start={self.start} is not below end={self.end}; lower start or raise end")
        return self

    def build(self, making: Making) -> Part:
        from braid.rewards.base import Part
        from braid.rewards.rules import length

        return Part(partial(length, self))
