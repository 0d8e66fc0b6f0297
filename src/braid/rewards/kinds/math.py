"""Mathematical equality."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from braid.types import Prompt

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class MathReward(RewardPart):
    r"""1 if math-verify finds the answer equal to the reference, else 0. The answer follows the reasoning (0
    if that has no end): what is in the last `<answer>` tag; in it, or in the text without one, the last
    `\boxed{}` or `\fbox{}`, else the last number after `####`, else what math-verify finds."""

    kind: Literal["math"]
    """Mathematical equality by math-verify."""
    pattern: str | None = None
    """Regular expression; group 1 of its last match after the reasoning is the answer. No match scores 0."""

    scores_in_processes: ClassVar[bool] = True

    def build(self, making: Making) -> Part:
        from braid.rewards.parts import math_part

        return math_part(None if self.pattern is None else making.pattern(self.pattern), making.timeout_s)

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object]:
        from braid.rewards.base import references_of

        return references_of
