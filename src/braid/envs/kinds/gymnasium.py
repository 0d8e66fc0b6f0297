"""Gymnasium environments, registered or of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from .simulator import Maker, SimulatorEnv

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.plan.plan import Plan


class GymnasiumEnv(SimulatorEnv):
    """A vectorized Gymnasium environment."""

    kind: Literal["gymnasium"]
    """A vectorized Gymnasium environment."""
    id: str
    """Registered id of the environment, for example CartPole-v1; or your own: package.module.Class, or
    file.py:Class relative to the config's folder, a gymnasium.Env or a function that makes one."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of gymnasium.make, or of the class or function."""
    rescale_actions: bool = False
    """Rescale actions from [-1, 1] to the bounds of the environment's, such as PushT's pixels."""
    vectorized: bool = False
    """Make one VectorEnv per process, with gymnasium.make_vec or a class or function of your own that takes
    `num_envs`, instead of separate environments. It must take a list of seeds, one per environment. Unless
    its auto-reset mode is DISABLED, its episodes begin together."""

    @property
    def made_by(self) -> Maker:
        return Maker(self.id, self.id, self.kwargs, self.vectorized)

    @property
    def steps_together(self) -> bool:
        return self.vectorized

    @property
    def rescales(self) -> bool:
        return self.rescale_actions

    def problems(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        yield from super().problems(config, plan)
        if config.sac is not None and not self.rescale_actions:
            why = "SAC's actions are between -1 and 1, and have to be rescaled to the environment's bounds"
            yield "env.rescale_actions", f"{why}; set it to true"
