"""What every reward part is, and what parts ask of a trajectory.

A part is called with a valid trajectory and returns its score, or where that may take long, a function to await for it.
Whatever goes wrong leaves as RewardError. Weights, retries and sums are scorer.py's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from braid.errors import RewardError
from braid.types import Message, Trajectory

Later = Callable[[], Awaitable[object]]
"""What to await for a score; awaited anew for each further try."""


class Part(Protocol):
    """One kind of score."""

    def __call__(self, trajectory: Trajectory) -> float | Later: ...

    def close(self) -> None:
        """Give up threads and processes."""
        ...


@dataclass(frozen=True, slots=True)
class BatchScores:
    """One score, or what went wrong, for each trajectory. `num_truncated` inputs were cut to the longest allowed."""

    scores: Sequence[float | RewardError]
    num_truncated: int


class Classifier(Protocol):
    """A reward model, as models.sequence_classifier builds it."""

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], bool]:
        """The conversation's tokens, and whether they were cut. Raises RewardError when they are too many."""
        ...

    def batches(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Numbers of rows to be scored together."""
        ...

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]: ...


class Generate(Protocol):
    """Asks the policy for a reply that is not trained on. Raises RewardError when there is none."""

    async def __call__(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, key: tuple[int, ...]
    ) -> str:
        """`temperature` 0 takes the likeliest token; `key` seeds the draws."""
        ...


@dataclass(frozen=True, slots=True)
class Services:
    """What parts need of models and of the rollout engine. Whoever builds a run hands it in; parts that need what is not
    there are refused.

    `classifiers` has a reward model for each number of a part that needs one.
    """

    classifiers: Mapping[int, Classifier]
    generate: Generate | None = None


NO_SERVICES = Services({})


def references_of(trajectory: Trajectory) -> list[str]:
    """The reference answers, any of which is right."""
    answer = trajectory.prompt.fields.get("answer")
    if answer is None or answer == []:
        raise RewardError(
            "the prompt has no reference answer; set answer_key of its source to the column that has it, or fill it in"
        )
    return [str(item) for item in (answer if isinstance(answer, list) else [answer])]


def task_of(trajectory: Trajectory) -> str:
    """The text of the prompt's last message."""
    messages = trajectory.prompt.messages
    return messages[-1]["content"] if messages else ""


def column_of(trajectory: Trajectory, name: str, *, key: str) -> Any:
    """The prompt's column `name`, which the config key `key` of the part names."""
    fields = trajectory.prompt.fields
    if name not in fields:
        raise RewardError(
            f"the prompt has no column {name!r}; set {key} to one of {', '.join(map(str, fields))}"
        )
    return fields[name]
