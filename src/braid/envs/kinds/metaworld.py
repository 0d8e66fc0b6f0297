"""MetaWorld."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt

from braid.sections import Unused

from .simulator import ADAPTERS, Maker, SimulatorEnv

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.plan.plan import Plan


class MetaworldEnv(SimulatorEnv):
    """MetaWorld: 50 tasks of a Sawyer arm in MuJoCo (extra `metaworld`)."""

    kind: Literal["metaworld"]
    """A task of MetaWorld."""
    task: str
    """Name of the task, for example reach-v3, or of one of MetaWorld's sets: MT10, MT25, MT50, and ML10, ML25
    and ML45 with -train or -test. Of a set, the seed of a reset, modulo the number of tasks, decides the
    episode's."""
    instruction: str | None = None
    """Text for policies that read it; the task's name in words when null."""
    max_episode_steps: PositiveInt = 500  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    """Maximum env steps, after which an episode is truncated."""
    terminate_on_success: bool = False
    """End an episode at its first success."""
    reward_mode: Literal["dense", "success"] = "dense"
    """Rewards: those of MetaWorld, or 1 while the task is fulfilled."""
    cameras: dict[str, str] = Field(default_factory=dict)
    """Images of the observations: name -> camera (corner, corner2, corner3, corner4, topview, behindGripper,
    gripperPOV). With cameras the state is only the gripper's position and opening."""
    image_size: PositiveInt = 64
    """Height and width of images, in pixels."""
    shadows: bool = False
    """Render shadows, reflections, sky and antialiasing, as MetaWorld does; on a CPU twelve times slower."""

    package: ClassVar[str | None] = "metaworld"

    @property
    def made_by(self) -> Maker:
        render_mode = "rgb_array" if self.video.are_saved else None
        arguments = self.own_settings() | {"render_mode": render_mode}
        return Maker(self.task, f"{ADAPTERS}.metaworld.MetaWorld", arguments)

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        yield from super().unused(config, plan)
        if self.video.are_saved:
            return
        if not self.cameras:
            yield "there are neither cameras nor videos", "env.{image_size,shadows}"
        if not config.model.kind.reads_text:
            yield "a perceptron reads no text, and there are no videos", "env.instruction"
