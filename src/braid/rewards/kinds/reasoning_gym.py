"""The scorers of reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from braid.errors import RewardError
from braid.types import Prompt

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class ReasoningGymReward(RewardPart):
    """The scorer of the procedural source."""

    kind: Literal["reasoning_gym"]
    """The scorer of the procedural source."""
    pattern: str | None = None
    """Regular expression; group 1 of its last match is the answer to score. The whole text when null."""

    scores_in_processes: ClassVar[bool] = True
    is_deterministic: ClassVar[bool] = True

    def build(self, making: Making) -> Part:
        from braid.rewards.parts import reasoning_gym_part

        return reasoning_gym_part(making.pattern(self.pattern), making.timeout_s)

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object]:
        def read(prompt: Prompt) -> None:
            if "reasoning_gym" not in prompt.fields:
                raise RewardError(
                    f"source {prompt.source!r} is not procedural; "
                    f"list only procedural sources in {key}.sources"
                )

        return read
