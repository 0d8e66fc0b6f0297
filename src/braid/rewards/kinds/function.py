"""Functions of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from braid.functions import load_function
from braid.types import Prompt

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part
    from braid.rewards.parts import GroupPart


class FunctionReward(RewardPart):
    """A user-defined Python function."""

    kind: Literal["function"]
    """A Python function, sync or async."""
    path: str
    """Dotted path, `package.module.function`, or `file.py:function` relative to the config file."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of the function."""
    group: bool = False
    """Call the function once for the valid trajectories of a group: each argument but those of params is a
    list, and the function returns a list of numbers in the same order."""

    reads_files: ClassVar[bool] = True
    is_tried: ClassVar[bool] = True

    @property
    def metric_name(self) -> str:
        return self.name or re.split(r"[.:]", self.path)[-1] or self.kind

    def build(self, making: Making) -> Part | GroupPart:
        from braid.rewards.parts import function_part

        return function_part(self, making)

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object] | None:
        from braid.rewards.parts import arguments_of

        function = load_function(self.path, base_dir=base_dir, key=f"{key}.path")
        arguments = arguments_of(function, self.params, path=self.path, key=key)
        return arguments.check if arguments.columns else None
