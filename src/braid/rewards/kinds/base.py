"""What code asks of every kind of reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from braid.cores import num_cores
from braid.sections import Section
from braid.types import Prompt

if TYPE_CHECKING:
    from braid.config.reward import RewardConfig
    from braid.rewards.base import Making, Part
    from braid.rewards.classifier import ModelPart
    from braid.rewards.parts import GroupPart


class RewardPart(Section):
    """One kind of reward."""

    if TYPE_CHECKING:
        kind: Any

    name: str = ""
    """Name of the part in metrics (`reward/part/NAME`); its kind, or the function's name, when empty."""
    weight: float = 1.0
    """Weight in the sum."""
    sources: tuple[str, ...] = ()
    """Names of the data sources whose trajectories it scores; `*` for all that no part names; all when
    empty."""

    has_model: ClassVar[bool] = False
    """Whether a model of its own scores, at `path`."""
    is_deterministic: ClassVar[bool] = False
    """Whether it gives an answer the same score each time, at next to no cost."""
    has_own_limits: ClassVar[bool] = False
    """Whether its own settings, not those of `reward`, limit its calls and their retries."""
    runs_programs: ClassVar[bool] = False
    """Whether it runs programs in the sandbox of reward.code."""
    scores_in_processes: ClassVar[bool] = False
    """Whether processes of its own score, so that more calls than cores gain nothing."""
    reads_files: ClassVar[bool] = False
    """Whether a file of the user's decides what it reads of a prompt."""
    reads_messages: ClassVar[bool] = False
    """Whether it reads the messages of a prompt, not only its columns."""
    is_tried: ClassVar[bool] = False
    """Whether it is called on an example before a run."""

    @property
    def metric_name(self) -> str:
        """Name of the part in metrics."""
        return self.name or self.kind

    @property
    def shows_images(self) -> bool:
        """Whether a model that scores reads the images of prompts."""
        return False

    def limits(self, config: RewardConfig) -> tuple[int, int]:
        """(retries of a call, maximum number of concurrent calls)."""
        most = num_cores() if self.scores_in_processes else config.concurrency
        return config.retries, min(config.concurrency, most)

    def build(self, making: Making) -> Part | ModelPart | GroupPart:
        """The part itself. Raises ConfigError for invalid patterns, functions, templates, keys and URLs, and
        if it needs a model which the run lacks."""
        raise NotImplementedError

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object] | None:
        """What it reads of a prompt, raising RewardError if it is not there; None if it reads nothing. The
        part is at the config key `key`. Raises ConfigError."""
        return None

    def problems(self, key: str, max_tokens: int | None) -> Iterator[tuple[str, str]]:
        """(key, message) of settings that do not fit a policy of at most `max_tokens` tokens, if known."""
        yield from ()

    def prompt_problems(self, key: str, prompt: Prompt) -> Iterator[tuple[str, str]]:
        """(key, message) of what is wrong with what it reads of a prompt."""
        yield from ()

    def secrets(self, key: str) -> Iterator[tuple[str, str]]:
        """(key, name) of its settings that go to a server by these names, of the part at the key `key`."""
        yield from ()
