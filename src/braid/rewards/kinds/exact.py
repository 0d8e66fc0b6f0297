"""Equality of texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from braid.types import Prompt

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class ExactReward(RewardPart):
    """1 if the answer equals the reference, else 0."""

    kind: Literal["exact"]
    """Equality of texts."""
    pattern: str | None = None
    """Regular expression; group 1 of its last match is the answer. The whole text when null."""
    ignore_case: bool = False
    """Ignore case."""
    ignore: str = ""
    """Characters to ignore, such as the comma of 1,000."""

    is_deterministic: ClassVar[bool] = True

    def build(self, making: Making) -> Part:
        from braid.rewards.base import Part
        from braid.rewards.rules import exact

        return Part(exact(self, making.pattern(self.pattern)))

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object]:
        from braid.rewards.base import references_of

        return references_of
