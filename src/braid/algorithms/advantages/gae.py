"""gae: generalized advantage estimation, with a critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from braid.types import AdvantageLevel, Bootstrap

from .base import Advantage, Round, Tensor, ValueLevel


class Gae(Advantage):
    """Generalized advantage estimation over positions; or over turns or actions, with the sum of their
    rewards and the value of their first position (formulas.gae)."""

    needs_values = True

    kind: Literal["gae"] = "gae"
    """Generalized advantage estimation."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount factor per position, or per turn with level=turn."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Lambda of generalized advantage estimation."""
    level: AdvantageLevel = "trajectory"
    """turn: one reward and one value per turn, that of its first token, instead of one per token. Robots: by
    algorithm.reward_level."""
    bootstrap: Bootstrap = "truncated"
    """Robots' episodes whose return goes on with the value of the last state: those truncated by a time
    limit, or all, also where the task itself has ended (RLinf's ManiSkill recipes)."""

    @property
    def value_level(self) -> ValueLevel:
        return "token" if self.level == "trajectory" else self.level

    @property
    def bootstraps_ends(self) -> bool:
        return self.bootstrap == "always"

    def of_simulator(self, level: Literal["action", "turn"]) -> Gae:
        return self.model_copy(update={"level": level})

    def compute(self, round_: Round) -> Tensor:
        """Also writes `returns` into the rows."""
        import torch

        from .formulas import gae

        values = round_.field("values")
        is_open = [
            self.bootstraps_ends or not trajectory[-1].is_terminal for trajectory in round_.trajectories
        ]
        bootstrap = [
            float(trajectory[-1].fields["values"][-1]) if goes_on else 0.0
            for goes_on, trajectory in zip(is_open, round_.trajectories, strict=True)
        ]
        if self.value_level != "token":
            turns = round_.turns(are_actions=self.value_level == "action")
            everywhere = torch.ones(len(turns.rewards), dtype=torch.bool)
            steps = (turns.rewards, values[turns.first], everywhere, turns.lengths)
            spread = turns.spread
        else:
            steps = (round_.rewards, values, round_.mask, round_.lengths)
            spread = torch.Tensor.contiguous
        advantages, returns = gae(*steps, torch.tensor(bootstrap), gamma=self.gamma, lam=self.gae_lambda)
        round_.write("returns", spread(returns))
        return spread(advantages)

    def report(self, round_: Round) -> dict[str, float]:
        """1 - var(return - value) / var(return) over the positions whose value is learned; nan if all returns
        are equal."""
        valued = round_.mask
        if self.value_level != "token":
            valued = round_.turns(are_actions=self.value_level == "action").first
        returns, values = (
            round_.field(name)[valued].numpy().astype("float64") for name in ("returns", "values")
        )
        variance = returns.var()
        explained = float(1.0 - (returns - values).var() / variance) if variance > 0 else float("nan")
        return {"critic/explained_variance": explained}
