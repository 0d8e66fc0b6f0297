"""ManiSkill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from .simulator import ADAPTERS, CameraEnv, Maker


class ManiskillEnv(CameraEnv):
    """ManiSkill: tasks of robot arms in SAPIEN (extra `maniskill`). Needs a Vulkan device."""

    kind: Literal["maniskill"]
    """A task of ManiSkill."""
    task: str
    """Registered name of the task, for example PutCarrotOnPlateInScene-v1."""
    obs_mode: str | None = None
    """Observations, in ManiSkill's words: state, rgb, ...; the task's default when null."""
    control_mode: str | None = None
    """Controller of the robot, in ManiSkill's words; the task's default when null."""
    reward_mode: str | None = None
    """Rewards: success, 1 while the task is fulfilled; put_on, 0.1 for a grasp of the object and 0.1 for one
    of five steps besides; or in ManiSkill's words normalized_dense, dense, sparse, none. The task's default
    when null."""
    on_gpu: bool = False
    """Simulate all environments of a process in one scene on the GPU. If false, each has its own scene on the
    CPU."""
    gripper: Literal["signed", "open_is_one"] = "signed"
    """Meaning of the last number of an action: signed, as in the simulator, opens the gripper if it is
    positive; open_is_one, as in OpenVLA's data, if it is above 0.5."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of ManiSkill's environment, such as sim_config."""

    package: ClassVar[str | None] = "mani_skill"

    @property
    def made_by(self) -> Maker:
        size = {"height": self.camera_height, "width": self.camera_width}
        modes = {name: getattr(self, name) for name in ("obs_mode", "control_mode", "reward_mode")}
        arguments = {name: mode for name, mode in modes.items() if mode is not None}
        arguments |= {"task": self.task, "max_episode_steps": self.max_episode_steps, "gripper": self.gripper}
        arguments |= {**self.kwargs, "sensor_configs": size | self.kwargs.get("sensor_configs", {})}
        if self.video.are_saved:
            arguments = {"render_mode": "rgb_array", **arguments}
        if self.on_gpu:
            arguments["ignore_terminations"] = self.ignore_terminations
        form = "ManiSkillBatch" if self.on_gpu else "ManiSkill"
        return Maker(self.task, f"{ADAPTERS}.maniskill.{form}", arguments, self.on_gpu)

    @property
    def steps_together(self) -> bool:
        return self.on_gpu

    @property
    def goes_on(self) -> bool:
        return self.ignore_terminations and not self.on_gpu  # a scene on the GPU does it itself

    def needs_gpu(self) -> Iterator[tuple[str, str, str]]:
        if self.on_gpu:
            yield "env.on_gpu", "a scene of ManiSkill on the GPU", "set it to false"
