"""maxrl: the reward relative to the pass rate of its prompt."""

from __future__ import annotations

from typing import Literal

from .base import Advantage, Round, Tensor


class MaxRl(Advantage):
    """The reward minus the group's mean, divided by that mean (formulas.likelihood_advantages)."""

    compares_group = True
    divides_by_mean = True

    kind: Literal["maxrl"] = "maxrl"
    """The reward relative to the pass rate of its prompt."""

    def compute(self, round_: Round) -> Tensor:
        from .formulas import likelihood_advantages

        return round_.spread(likelihood_advantages(round_.totals, round_.groups))
