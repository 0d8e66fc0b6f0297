"""The base of policy losses: what one declares, and the ratio that it reads. Nothing here imports torch
before it computes, so that a config is read quickly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat

from braid.kinds import Kind
from braid.types import RatioLevel

if TYPE_CHECKING:
    from torch import Tensor

    from braid.algorithms.segments import Segments
    from braid.algorithms.surrogate import PerToken, Surrogate, Tokens
else:
    PerToken = Segments = Surrogate = Tensor = Tokens = Any

__all__ = ["PerToken", "PolicyLoss", "RatioLoss", "Surrogate", "Tensor", "Tokens"]


class PolicyLoss(Kind):
    """A policy loss: a surrogate objective of each token.

    In formulas, `rho` is the token's ratio, sg() the stop-gradient, and A the advantage.
    """

    config_key = "algorithm.policy_loss"
    selects_tokens: ClassVar[bool] = False
    """Whether it acts on tokens that `select` chooses over the whole step, by log-probs before the update."""

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> PolicyLoss:
        from .function import FunctionLoss

        return FunctionLoss.calling(function)

    @property
    def has_segment_ratio(self) -> bool:
        """Whether its ratio is one of turns or sequences, not of tokens."""
        return False

    @property
    def compares_sampler(self) -> bool:
        """Whether its ratio is to the sampling engine, whatever algorithm.old_logprobs is."""
        return False

    @property
    def reads_sequences(self) -> bool:
        """Whether its ratio is one of whole sequences, so that a trajectory's rows must be in one
        micro-batch."""
        return False

    def ratio(
        self,
        logprobs: PerToken,
        old_logprobs: PerToken,
        segments: Callable[[str], Segments | None],  # noqa: ARG002  # for ratios of segments
    ) -> PerToken:
        """The ratio to the old policy [T], also for metrics; here that of each token. `segments` returns the
        turns or sequences of the batch for a level of a ratio."""
        from braid.algorithms.surrogate import importance_ratio

        return importance_ratio(logprobs, old_logprobs, None)

    def per_token(self, tokens: Tokens) -> Surrogate:
        """The loss of each token [T], to be minimised, and the diagnostics that `metrics` declares,
        detached."""
        raise NotImplementedError(f"{type(self).__name__} must define per_token(self, tokens)")

    def select(self, covariances: Tensor, priorities: Tensor) -> Tensor:
        """Which of the N tokens of a step are selected [N], from the covariances of advantages and log-probs
        (covariance.py). Ties and samples go by `priorities`, uniform random numbers."""
        raise NotImplementedError(f"{type(self).__name__} must define select(self, covariances, priorities)")


class RatioLoss(PolicyLoss):
    """A policy loss of the importance ratio."""

    ratio_level: RatioLevel = "token"
    """Level of the probability ratio: per token; the geometric mean over a turn or a sequence (GSPO); or the
    product over them, the ratio of the whole turn or sequence (turn_product, sequence_product)."""
    ratio_to: Literal["old", "behavior"] = "old"
    """Denominator of the ratio: algorithm.old_logprobs (old), or the engine's log-probs (behavior) while
    corrections compare the old ones with the engine's."""
    log_ratio_min: Annotated[float, Field(le=0.0)] | Literal["off"] = "off"
    """Lower bound on the log ratio, before any clipping; tokens below it have no gradient. off for -20."""
    log_ratio_max: NonNegativeFloat | Literal["off"] = "off"
    """Upper bound on the log ratio, before any clipping; tokens above it have no gradient. off for 20."""

    @property
    def has_segment_ratio(self) -> bool:
        return self.ratio_level != "token"

    @property
    def compares_sampler(self) -> bool:
        return self.ratio_to == "behavior"

    @property
    def reads_sequences(self) -> bool:
        return self.ratio_level.startswith("sequence")

    def ratio(
        self, logprobs: PerToken, old_logprobs: PerToken, segments: Callable[[str], Segments | None]
    ) -> PerToken:
        """The ratio of `ratio_level`, within the bounds."""
        from braid.algorithms.surrogate import importance_ratio

        return importance_ratio(
            logprobs,
            old_logprobs,
            segments(self.ratio_level),
            is_product=self.ratio_level.endswith("product"),
            log_min=None if self.log_ratio_min == "off" else self.log_ratio_min,
            log_max=None if self.log_ratio_max == "off" else self.log_ratio_max,
        )
