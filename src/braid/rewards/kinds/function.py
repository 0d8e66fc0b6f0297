"""Functions of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from braid.functions import Passed, load_function, passed_in
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

    _passed: Passed = PrivateAttr(default_factory=dict)
    """The function at `path`, if it was passed to the Python API."""

    @model_validator(mode="after")
    def _keep_passed(self, info: ValidationInfo) -> Self:
        self._passed = {path: function for path, function in passed_in(info).items() if path == self.path}
        return self

    def load(self, key: str, base_dir: Path) -> Callable[..., Any]:
        """The function of the part at `key`. Raises ConfigError like load_function."""
        return load_function(self.path, base_dir=base_dir, key=f"{key}.path", passed=self._passed)

    @property
    def metric_name(self) -> str:
        return self.name or re.split(r"[.:]", self.path)[-1] or self.kind

    def build(self, making: Making) -> Part | GroupPart:
        from braid.rewards.parts import function_part

        return function_part(self, making)

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object] | None:
        from braid.rewards.parts import arguments_of

        arguments = arguments_of(self.load(key, base_dir), self.params, path=self.path, key=key)
        return arguments.check if arguments.columns else None
