"""Reward parts, protocols of the models they use, and helpers that read a trajectory.

Every failure is a RewardError. Weights, retries and sums are in scorer.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from braid.config.reward import RewardConfig
from braid.errors import ConfigError, Problem, RewardError
from braid.types import Encoded, Image, Message, Prompt, Trajectory, text_of

Later = Callable[[], Awaitable[object]]
"""Async function that returns a score; called again for each retry."""
Score = Callable[[Trajectory], float | Later]
"""Score of a valid trajectory or, for a slow computation, an async function that returns it."""


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A reward part. `close` releases its threads and processes."""

    score: Score
    close: Callable[[], None] = _nothing


class Classifier(Protocol):
    """A reward model, as models.sequence_classifier builds it."""

    def encode(self, messages: Sequence[Message]) -> tuple[Encoded, bool]:
        """The conversation, and whether it was truncated. Raises RewardError if it has too many tokens."""
        ...

    def batches(self, rows: Sequence[Encoded]) -> list[list[int]]:
        """Partition the rows into batches, each a list of row indices."""
        ...

    def scores(self, rows: Sequence[Encoded]) -> list[float]: ...


class Generate(Protocol):
    """Generates a reply of the policy, which is not trained on, or of a judge's model. Raises RewardError on
    failure."""

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        key: tuple[int, ...],
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> str:
        """Return the reply to `messages`. `temperature` 0 is greedy; `key` seeds the sampling; `top_p` and
        `top_k` as in rollout.engine.Sampling."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """Models and rollout engine for the parts that need them, provided when the run is built. A part whose
    service is missing is refused.

    `classifiers` maps the number of a part to its reward model, `judges` to its judge's model; `generate` is
    the policy. `image_size` is the width and height in pixels of an image as the policy reads it.
    """

    classifiers: Mapping[int, Classifier]
    generate: Generate | None = None
    image_size: Callable[[Image], tuple[int, int]] | None = None
    judges: Mapping[int, Generate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Making:
    """What a part is built from beside its own settings: `reward` of the config, the part's number in it, the
    folder that paths of files are relative to, the run's seed, and models."""

    config: RewardConfig
    number: int
    base_dir: Path
    seed: int
    services: Services

    @property
    def key(self) -> str:
        """Config key of the part."""
        return f"reward.parts[{self.number}]"

    @property
    def timeout_s(self) -> float:
        """Time limit of a call."""
        return self.config.timeout_s

    def pattern(self, pattern: str | None, *, flags: int = 0) -> Callable[[str], str | None]:
        """What extracts the answer from a text by the part's `pattern`; see rules.extraction."""
        from .rules import extraction

        return extraction(pattern, self.timeout_s, key=f"{self.key}.pattern", flags=flags)

    def without_service(self, key: str, what: str) -> ConfigError:
        """That the part needs a model which the run lacks."""
        return ConfigError([Problem(key, f"needs {what}, which was not given to this scorer", "config")])


def references_of(prompt: Prompt) -> list[str]:
    """The reference answers, any of which is correct. Raises RewardError if there is none."""
    answer = prompt.fields.get("answer")
    if answer is None or answer == []:
        raise RewardError(
            "the prompt has no reference answer; set answer_key of its source to the right column, or "
            "complete the data"
        )
    return [str(item) for item in (answer if isinstance(answer, list) else [answer])]


def task_of(trajectory: Trajectory) -> str:
    """The text of the prompt's last message."""
    messages = trajectory.prompt.messages
    return text_of(messages[-1]["content"]) if messages else ""


def column_of(prompt: Prompt, name: str, *, key: str) -> Any:
    """The prompt's column `name`. Raises RewardError if it is missing, pointing to the config key `key`."""
    fields = prompt.fields
    if name not in fields:
        raise RewardError(
            f"the prompt has no column {name!r}; set {key} to one of {', '.join(map(str, fields))}"
        )
    return fields[name]
