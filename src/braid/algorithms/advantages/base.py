"""The base of advantages: what one declares. Nothing here imports torch before it computes, so that a config
is read quickly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from braid.kinds import Kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from braid.types import Row

    from .round import Round
else:
    Round = Tensor = Any

__all__ = ["Advantage", "Round", "Tensor"]

ValueLevel = Literal["token", "action", "turn"]


class Advantage(Kind):
    """An advantage: from the rewards, and perhaps the values, of a round to the advantage of each
    position."""

    config_key = "algorithm.advantage"
    needs_values: ClassVar[bool] = False
    """Whether it reads values, which a critic learns from the `returns` that it writes."""
    needs_greedy: ClassVar[bool] = False
    """Whether the reward of each prompt's greedy answer is its baseline."""
    compares_group: ClassVar[bool] = False
    """Whether it compares the trajectories of a group, so that it is 0 where all rewards are equal."""
    divides_by_mean: ClassVar[bool] = False
    """Whether it divides by the mean reward of a group, which must be positive."""
    reads_observations: ClassVar[bool] = False
    """Whether it reads what a decision observed: a row's inputs and observations."""
    ignores_reward_scale: ClassVar[bool] = False
    """Whether the scale of rewards does not matter."""

    @property
    def least_group(self) -> int:
        """Fewest answers of a group with which an advantage can differ from 0."""
        return 2 if self.compares_group else 1

    @property
    def is_centered(self) -> bool:
        """Whether the advantages of a group's trajectories sum to 0, in the order of their rewards."""
        return False

    @property
    def has_unit_std(self) -> bool:
        """Whether those of a group with unequal rewards have a standard deviation of 1."""
        return False

    @property
    def ignores_reward_mean(self) -> bool:
        """Whether a constant subtracted from all rewards of a group cancels."""
        return False

    @property
    def value_level(self) -> ValueLevel:
        """What a value and a return are those of: a token, a robot's action, or a turn."""
        return "token"

    @property
    def bootstraps_ends(self) -> bool:
        """Whether returns go on after the end of the task itself."""
        return False

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> Advantage:
        from .function import FunctionAdvantage

        return FunctionAdvantage.calling(function)

    def of_simulator(self, level: Literal["action", "turn"]) -> Advantage:  # noqa: ARG002
        """The same for a simulator, whose returns and values are those of actions or decisions."""
        return self

    def of_parts(self, weights: Mapping[str, float]) -> Advantage:  # noqa: ARG002
        """The same for rewards of these parts, by name with their weights."""
        return self

    def compute(self, round_: Round) -> Tensor:
        """The advantages of all positions of the round [T], 0 outside the mask."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(self, round_)")

    def replay(self, segments: Sequence[Row]) -> NDArray[np.float64] | None:  # noqa: ARG002
        """The advantages of the positions of one trajectory [T], by a plain loop in float64, to compare those
        of `compute` with; None where there is no such loop."""
        return None

    def report(self, round_: Round) -> dict[str, float]:  # noqa: ARG002
        """Metrics of the round, after `compute`: full name -> value."""
        return {}
