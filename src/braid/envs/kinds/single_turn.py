"""Episodes of one answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from .text import TextEnv

if TYPE_CHECKING:
    from braid.envs.agents.base import AgentEnv


class SingleTurnEnv(TextEnv):
    """The policy answers once, and rewards score the answer."""

    kind: Literal["single_turn"] = "single_turn"
    """One response per prompt."""

    has_step_metrics: ClassVar[bool] = False

    @property
    def ends_cut_turns(self) -> bool:
        return True

    def environments(self, base_dir: Path) -> tuple[Callable[[], AgentEnv], None]:
        from braid.envs.agents.single_turn import SingleTurn

        return SingleTurn, None
