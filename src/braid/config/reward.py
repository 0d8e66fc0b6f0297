"""Rewards: parts, each a score with a weight."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Section


class _Part(Section):
    name: str = ""
    """Names the part in metrics; its kind when empty."""
    weight: float = 1.0
    """Factor in the sum."""
    sources: tuple[str, ...] = ()
    """Names of the data sources whose trajectories it scores; all when empty."""


class MathReward(_Part):
    """1 if math-verify finds the answer equal to the reference, else 0."""

    kind: Literal["math"]
    """Mathematical equality by math-verify."""


class ReasoningGymReward(_Part):
    """The generator's own scorer, for procedural sources."""

    kind: Literal["reasoning_gym"]
    """The scorer that belongs to the procedural source."""
    pattern: str | None = None
    """Regular expression whose last match's first group is the answer to score; the whole text when absent."""


class ExactReward(_Part):
    """1 if the answer equals the reference, else 0."""

    kind: Literal["exact"]
    """Equality of text."""
    pattern: str | None = None
    """Regular expression whose last match's first group is the answer; the whole text when absent."""
    ignore_case: bool = False
    """Compare without regard to case."""
    ignore: str = ""
    """Characters that do not count, such as the comma of 1,000."""


class PatternReward(_Part):
    """1 if the text matches, else 0: for format rewards."""

    kind: Literal["pattern"]
    """A regular expression to find in the text."""
    pattern: str
    """Searched for in the whole answer (dot matches newlines)."""


class FunctionReward(_Part):
    """A Python function of yours."""

    kind: Literal["function"]
    """Any function, plain or async."""
    path: str
    """Dotted path, `package.module.function`, or `file.py:function` relative to the config."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Passed as keyword arguments."""


RewardPart = Annotated[
    MathReward | ReasoningGymReward | ExactReward | PatternReward | FunctionReward,
    Field(discriminator="kind"),
]


class OverlongConfig(Section):
    """A penalty that grows linearly over the last tokens before the limit (DAPO, arXiv 2503.14476)."""

    buffer_tokens: PositiveInt
    """Tokens before rollout.sampling.max_new_tokens over which it grows."""
    penalty: PositiveFloat = 1.0
    """What is taken off at the limit."""


class RewardConfig(Section):
    """How trajectories are scored. The parts are summed with their weights, then added to the environment's own; the sum is
    zeroed (`truncated`), penalised (`overlong`), scaled, shifted and clipped, in this order."""

    parts: tuple[RewardPart, ...] = ()
    """Scores of the final text."""
    truncated: Literal["keep", "zero"] = "keep"
    """zero: a trajectory that a limit cut off has reward 0."""
    overlong: OverlongConfig | None = None
    """Penalty of long answers."""
    scale: float = 1.0
    """Factor of the reward, in training only."""
    shift: float = 0.0
    """Added to it after scaling, in training only."""
    clip: PositiveFloat | None = None
    """Bound on its absolute value, in training only; null for none."""
    timeout_s: PositiveFloat = 30.0
    """Limit for one call of one part."""
    retries: NonNegativeInt = 1
    """Further tries after a failed call before the trajectory becomes invalid."""
    concurrency: PositiveInt = 16
    """Calls in flight at a time."""
