"""Instructions that a program can check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from braid.types import Prompt

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class IfevalReward(RewardPart):
    """1 if the answer follows the instruction of its row, else 0. The reference answer is the instruction: a
    function of allenai/RLVR-IFeval with its arguments, such as {"func_name": "verify_keywords",
    "keyword_list": ["tea"]}, as a mapping or JSON text; or a list of them, all of which must be followed."""

    kind: Literal["ifeval"]
    """Whether instructions on the form of the answer are followed."""

    is_deterministic: ClassVar[bool] = True

    def build(self, making: Making) -> Part:
        from braid.rewards.base import Part
        from braid.rewards.ifeval import follows

        return Part(follows)

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object]:
        from braid.rewards.ifeval import instructions_of

        return instructions_of
