"""Text environments that a config names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from braid.functions import load_function

from .base import AgentEnv


class AgentEnvs:
    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        base_dir: Path,
        _run_in: Literal["auto", "inline", "thread", "process"],
        _processes: int,
    ) -> None:
        self._class = load_function(name, base_dir=base_dir, key="env.name", allows_class=True)
        self._kwargs = kwargs

    def __call__(self) -> AgentEnv:
        return self._class(**self._kwargs)

    async def close(self) -> None: ...
