"""raft: imitation of the best of a group."""

from __future__ import annotations

from typing import Literal

from .base import Advantage, Round, Tensor


class Raft(Advantage):
    """1 for the trajectory with the highest reward of its group, else 0 (formulas.best_of_group)."""

    compares_group = True
    ignores_reward_scale = True

    kind: Literal["raft"] = "raft"
    """1 for the best of the group, else 0."""

    @property
    def ignores_reward_mean(self) -> bool:
        return True

    def compute(self, round_: Round) -> Tensor:
        from .formulas import best_of_group

        return round_.spread(best_of_group(round_.totals, round_.groups))
