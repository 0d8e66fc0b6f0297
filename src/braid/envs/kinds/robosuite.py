"""robosuite."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from .simulator import ADAPTERS, Maker, SimulatorEnv


class RobosuiteEnv(SimulatorEnv):
    """robosuite: manipulation tasks in MuJoCo (extra `robosuite`)."""

    kind: Literal["robosuite"]
    """A task of robosuite."""
    task: str
    """Name of the task, for example Lift."""
    robots: tuple[str, ...] = ("Panda",)
    """Names of the robots."""
    max_episode_steps: PositiveInt = 200  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    """Maximum env steps, after which an episode is truncated."""
    cameras: dict[str, str] = Field(default_factory=dict)
    """Images of the observations: name -> camera (agentview, frontview, robot0_eye_in_hand, ...). With
    cameras the state is only the robots'."""
    camera_height: PositiveInt = 128
    """Height of camera images, in pixels."""
    camera_width: PositiveInt = 128
    """Width of camera images, in pixels."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of robosuite.make, such as controller_configs."""

    package: ClassVar[str | None] = "robosuite"

    @property
    def made_by(self) -> Maker:
        return Maker(self.task, f"{ADAPTERS}.robosuite.Robosuite", self.own_settings())
