"""Multiple choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from braid.types import Prompt

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class ChoiceReward(RewardPart):
    """Whether the answer's letter equals the reference's: 1 or 0, unless `scores` are given. The letter is
    sought after the reasoning, in the last `<answer>` tag if there is one: the letter in the last box, else
    the one after the last "answer is" or "answer:", else the last letter that stands alone. Several letters,
    as in "B, C", are a wrong answer; the words "a" and "I" are none."""

    kind: Literal["choice"]
    """Multiple choice."""
    letters: str = Field(default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,}$")
    """Letters that are valid answers."""
    scores: tuple[float, float, float, float] = (1.0, 1.0, 0.0, 0.0)
    """Scores of the right letter in a box, elsewhere, of a wrong letter in a box, and of other answers."""

    is_deterministic: ClassVar[bool] = True

    def build(self, making: Making) -> Part:
        from braid.rewards.base import Part
        from braid.rewards.rules import choice

        return Part(choice(self))

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object]:
        from braid.rewards.base import references_of

        return references_of
