"""Penalties for repeated phrases."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveInt

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class RepetitionReward(RewardPart):
    """Minus the fraction of word n-grams that repeat an earlier one, regardless of case; 0 below n words."""

    kind: Literal["repetition"]
    """A penalty for repeated phrases."""
    ngram: PositiveInt = 3
    """Number of words in an n-gram."""

    is_deterministic: ClassVar[bool] = True

    def build(self, making: Making) -> Part:
        from braid.rewards.base import Part
        from braid.rewards.rules import repetition

        return Part(partial(repetition, self))
