"""What code asks of every kind of environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from braid.sections import Section
from braid.types import Prompt

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.plan.plan import Plan

    from .agent import MixedEnvConfig
    from .simulator import VideoConfig


class Environment(Section):
    """Where episodes take place: one kind of the `env` section."""

    if TYPE_CHECKING:
        kind: Any

    is_simulator: ClassVar[bool] = False
    """Whether its episodes are of observations and actions, not of text."""
    gives_rewards: ClassVar[bool] = False
    """Whether it may give rewards itself, so that a run needs no reward parts."""
    makes_tasks: ClassVar[bool] = False
    """Whether it makes its tasks itself, from seeds, if there is no data."""
    has_step_metrics: ClassVar[bool] = True
    """Whether metrics of its steps are reported."""
    package: ClassVar[str | None] = None
    """Package that it imports, which braid's extra of the kind's name installs."""

    @property
    def turn_limit(self) -> int | None:
        """Maximum turns of the policy in an episode of several; None if it has one."""
        return None

    @property
    def context_limit(self) -> int | None:
        """Maximum tokens of an episode of several turns, replies included; None if it has one."""
        return None

    @property
    def ends_cut_turns(self) -> bool:
        """Whether a turn that max_new_tokens cuts ends an episode of text as truncated."""
        return False

    @property
    def num_own_tasks(self) -> int | None:
        """Number of training tasks that it makes itself; None if they come from data."""
        return None

    @property
    def mixture(self) -> Mapping[str, MixedEnvConfig]:
        """The environments that it consists of, by name; empty if it is a single one."""
        return {}

    def kind_of_task(self, task: Prompt) -> str:
        """Name of the environment in the mixture that a task is for."""
        return task.source

    @property
    def opponents_every_rounds(self) -> int | None:
        """Rounds after which opponents get the policy's weights, 0 for never; None without opponents."""
        return None

    @property
    def has_equal_starts(self) -> bool:
        """Whether the episodes of a group begin in the same state."""
        return True

    def video_of(self, use: Literal["train", "eval"]) -> VideoConfig | None:
        """Settings of the videos of a round's episodes or of an evaluation's; None if they are not filmed."""
        return None

    def problems(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        """(key, message) of what cannot work in it, or in a run with it."""
        yield from ()

    def needs_gpu(self) -> Iterator[tuple[str, str, str]]:
        """(key, value in words, remedy) of each setting that needs a GPU."""
        yield from ()
