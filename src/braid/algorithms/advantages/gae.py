"""gae: generalized advantage estimation, with a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from jaxtyping import Bool, Float
from pydantic import Field

from braid.types import AdvantageLevel, Bootstrap

from .base import Advantage, Round, Tensor, ValueLevel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from braid.types import Row


class Gae(Advantage):
    """Generalized advantage estimation over positions; or over turns or actions, with the sum of their
    rewards and the value of their first position."""

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

    def replay(self, segments: Sequence[Row]) -> NDArray[np.float64] | None:
        """A_k = r_k + gamma V_{k+1} - V_k + gamma lambda A_{k+1}, from the last position back."""
        import numpy as np

        if self.value_level != "token":
            return None
        mask, rewards, values = (
            np.concatenate(arrays).astype(np.float64)
            for arrays in (
                [row.mask for row in segments],
                [row.fields["rewards"] for row in segments],
                [row.fields["values"] for row in segments],
            )
        )
        is_open = self.bootstraps_ends or not segments[-1].is_terminal
        advantages, advantage = np.zeros(len(mask)), 0.0
        following = float(values[-1]) if is_open else 0.0
        for k in np.flatnonzero(mask)[::-1]:
            delta = rewards[k] + self.gamma * following - values[k]
            advantages[k] = advantage = delta + self.gamma * self.gae_lambda * advantage
            following = values[k]
        return advantages

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


def gae(
    rewards: Float[Tensor, "T"],
    values: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    lengths: Sequence[int],
    bootstrap: Float[Tensor, "B"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "T"], Float[Tensor, "T"]]:
    """Generalized advantage estimation (arXiv 1506.02438): (advantages, returns), both 0 outside the mask.

    Over the policy positions k = 1..K of a row:

        delta_k = r_k + gamma V_{k+1} - V_k
        A_k     = delta_k + gamma lam A_{k+1}        A_{K+1} = 0
        R_k     = A_k + V_k

    V_k is the value of the state before position k; V_{K+1} is the row's bootstrap value, that of the state
    after its last position (0 if terminal). Environment tokens between turns are skipped: the last token of a
    turn is followed by the first of the next, and `rewards` and `values` are not read outside the mask.

    Takes about log2(longest row) operations on [T]. ROLL and SkyRL run over the padded width, including the
    values at padding and environment tokens. RLinf puts the reward of a text on the last padded position, so
    its discount depends on the padding.
    """
    import torch

    from .discounting import discounted_suffix_sums, is_last_of_row, rows_of_positions

    row = rows_of_positions(lengths, mask)[mask]
    reward, value, is_last = rewards[mask].double(), values[mask].double(), is_last_of_row(row)
    next_value = torch.where(is_last, bootstrap.double()[row], value.roll(-1))
    delta = reward + gamma * next_value - value
    advantage = discounted_suffix_sums(delta, gamma * lam * (~is_last).double(), max(lengths, default=0))

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[mask] = advantage.to(values.dtype)
    returns[mask] = (advantage + value).to(values.dtype)
    return advantages, returns
