"""The algorithm: a recipe by name, and every part of it that can be set apart."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from braid.types import Advantage, Aggregation, KlEstimator, KlPlace, PolicyLoss, RecipeName

from .base import Section


class AlgorithmConfig(Section):
    """Parts left null come from the recipe (`braid show` prints them)."""

    recipe: RecipeName = "grpo"
    """Named combination of the parts below."""
    advantage: Advantage | None = None
    """Credit assignment."""
    normalize_by_std: bool | None = None
    """grpo: divide by the group's standard deviation."""
    gamma: float | None = Field(default=None, ge=0.0, le=1.0)
    """gae: discount per position."""
    gae_lambda: float | None = Field(default=None, ge=0.0, le=1.0)
    """gae: trace decay."""
    whiten_advantages: bool | None = None
    """Shift and scale advantages to mean 0 and variance 1 over the round's valid positions."""
    policy_loss: PolicyLoss | None = None
    """Surrogate."""
    clip_low: NonNegativeFloat | None = None
    """Ratios below 1 - clip_low are clipped."""
    clip_high: NonNegativeFloat | None = None
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[float, Field(gt=1.0)] | Literal["off"] | None = None
    """Bound c > 1 on the ratio where the advantage is negative; off for none."""
    aggregation: Aggregation | None = None
    """How per-token losses become one number; denominators count the whole optimizer step."""
    aggregation_constant: PositiveFloat | None = None
    """token_sum_constant: divisor per sequence; the longest possible response when null."""
    kl_coef: NonNegativeFloat | None = None
    """Weight of the KL term against the reference; 0 needs no reference."""
    kl_estimator: KlEstimator | None = None
    """Estimator of the KL term."""
    kl_in: KlPlace | None = None
    """Whether the KL term is added to the loss or subtracted from each token's reward."""
    kl_clamp: PositiveFloat | Literal["off"] | None = None
    """Bound on the estimator's absolute value per token; off for none."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus."""
    value_clip: PositiveFloat | Literal["off"] | None = None
    """Bound on how far a value moves from the old one before its loss is clipped; off for none."""
    value_loss_coef: PositiveFloat | None = None
    """Weight of the value loss."""
    old_logprobs: Literal["auto", "current", "recompute", "behavior"] = "auto"
    """Denominator of the ratio: the current policy's own (one step per round), recomputed before the update,
    or the engine's. auto: current when a round has one step, else recompute."""
