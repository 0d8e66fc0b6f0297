"""LIBERO."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from .simulator import ADAPTERS, CameraEnv, Maker


class LiberoEnv(CameraEnv):
    """LIBERO: language-conditioned tasks of a Panda arm (extra `libero`). Its assets come from the Hub."""

    kind: Literal["libero"]
    """A task suite of LIBERO."""
    suite: Literal[
        "libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "libero_130"
    ] = "libero_10"
    """Task suite. The seed of a reset is the number of its initial state, modulo their number: those of the
    first task, of the second, ..."""
    task_ids: tuple[NonNegativeInt, ...] | None = None
    """Numbers of the suite's tasks to use; null for all."""
    max_episode_steps: PositiveInt = 512  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    """Maximum env steps, after which an episode is truncated."""
    gripper: Literal["signed", "open_is_one"] = "signed"
    """Meaning of the last number of an action: signed, as in the simulator, closes the gripper if it is
    positive; open_is_one, as in OpenVLA's data, opens it if it is above 0.5."""
    open_gripper: bool = True
    """Open the gripper in the env steps before an episode, in which objects fall into place."""

    package: ClassVar[str | None] = "libero"

    @property
    def made_by(self) -> Maker:
        return Maker(self.suite, f"{ADAPTERS}.libero.Libero", self.own_settings())
