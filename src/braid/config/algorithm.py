"""The algorithm: a recipe by name, and every part of it that can be set apart."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from braid.types import (
    Advantage,
    AdvantageLevel,
    Aggregation,
    CorrectionLevel,
    CorrectionMode,
    Divergence,
    KlEstimator,
    KlPlace,
    PolicyLoss,
    RatioLevel,
    RecipeName,
    RewardStatistics,
)

from .base import Section


class CorrectionConfig(Section):
    """One correction of the loss for what separates the sampler from the trainer: w = exp(old - behavior)."""

    level: CorrectionLevel = "token"
    """What w is taken over: each token; the product over a turn or a sequence; or the geometric mean over a turn
    (turn_geometric) or a sequence (geometric)."""
    mode: CorrectionMode = "truncate"
    """truncate: the loss is multiplied by w clamped to [low, high]. mask: tokens with w outside them are left out."""
    low: NonNegativeFloat = 0.0
    """Lower bound of w."""
    high: PositiveFloat = 2.0
    """Upper bound of w."""

    @model_validator(mode="after")
    def _ordered(self) -> CorrectionConfig:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is more than high={self.high:g}; lower it")
        return self


class AlgorithmConfig(Section):
    """Parts left null come from the recipe (`braid show` prints them)."""

    recipe: RecipeName = "grpo"
    """Named combination of the parts below."""
    reward_mean: RewardStatistics | None = None
    """What a trajectory's reward is centred on before credit is assigned: the mean of its group, of the round, of
    all rounds so far, or nothing."""
    reward_std: RewardStatistics | None = None
    """What it is then divided by, likewise a standard deviation; one of 0 divides by 1."""
    advantage: Advantage | None = None
    """Credit assignment."""
    advantage_level: AdvantageLevel | None = None
    """grpo: one reward per trajectory, or one per turn, compared within the group."""
    normalize_by_std: bool | None = None
    """grpo, gigpo: divide by the group's standard deviation."""
    gamma: float | None = Field(default=None, ge=0.0, le=1.0)
    """gae, reinforce: discount per position. gigpo: per turn."""
    gae_lambda: float | None = Field(default=None, ge=0.0, le=1.0)
    """gae: trace decay."""
    episode_weight: NonNegativeFloat | None = None
    """gigpo: weight of the part that compares trajectories."""
    turn_weight: NonNegativeFloat | None = None
    """gigpo: weight of the part that compares turns from the same state."""
    whiten_rewards: bool | None = None
    """Shift and scale per-position rewards to mean 0 and variance 1 over the round's valid positions."""
    whiten_advantages: bool | None = None
    """Shift and scale advantages to mean 0 and variance 1 over the round's valid positions."""
    advantage_clip: PositiveFloat | Literal["off"] | None = None
    """Bound on an advantage's absolute value, after whitening; off for none."""
    mask_truncated: bool | None = None
    """Leave trajectories that a limit cut off out of the loss and its denominators (they still count in their group's
    statistics)."""
    reward_level: Literal["chunk", "action"] = "chunk"
    """Robots: rewards and advantages per chunk of actions, or per action."""
    logprob_level: Literal["token", "action", "chunk"] = "token"
    """Robots: what a ratio is of."""
    entropy_level: Literal["token", "action", "chunk"] = "token"
    """Robots: what entropy is taken of."""
    policy_loss: PolicyLoss | None = None
    """Surrogate."""
    ratio_level: RatioLevel | None = None
    """What a ratio is of: a token, or the geometric mean over its turn or its sequence (GSPO)."""
    clip_low: NonNegativeFloat | None = None
    """Ratios below 1 - clip_low are clipped. dppo: the bound on the divergence where the ratio falls."""
    clip_high: NonNegativeFloat | None = None
    """Ratios above 1 + clip_high are clipped. dppo: the bound on the divergence where the ratio rises."""
    dual_clip: Annotated[float, Field(gt=1.0)] | Literal["off"] | None = None
    """Bound c > 1 on the ratio where the advantage is negative; off for none."""
    sapo_tau_positive: PositiveFloat | None = None
    """sapo: steepness of the gate where the advantage is positive."""
    sapo_tau_negative: PositiveFloat | None = None
    """sapo: steepness of the gate where it is negative."""
    topr_positive_weight: NonNegativeFloat | None = None
    """topr: weight of tokens with a positive advantage."""
    topr_negative_weight: NonNegativeFloat | None = None
    """topr: weight of the others."""
    cov_fraction: float | None = Field(default=None, ge=0.0, le=1.0)
    """clip_cov, kl_cov: share of the tokens whose covariance of advantage and log-prob is acted upon."""
    cov_low: float | None = None
    """clip_cov: least covariance of a token that may be clipped."""
    cov_high: float | None = None
    """clip_cov: greatest covariance of such a token."""
    cov_coef: NonNegativeFloat | None = None
    """kl_cov: weight of the penalty |logprob - old logprob| on the chosen tokens."""
    dppo_divergence: Divergence | None = None
    """dppo: divergence of a token's probability (a coin with it) that is bounded."""
    early_stop_ratio: PositiveFloat | Literal["off"] | None = None
    """An optimizer step whose mean ratio is above this changes nothing; off for none."""
    corrections: tuple[CorrectionConfig, ...] | None = None
    """Corrections for the difference between the engine's log-probs and the trainer's, applied one after the other."""
    aggregation: Aggregation | None = None
    """How per-token losses become one number; denominators count the whole optimizer step."""
    aggregation_constant: PositiveFloat | None = None
    """token_sum_constant: divisor per sequence; the longest possible response when null."""
    policy_loss_coef: NonNegativeFloat | None = None
    """Weight of the surrogate and of the KL term beside the entropy and supervised terms."""
    kl_coef: NonNegativeFloat | None = None
    """Weight of the KL term against the reference; 0 needs no reference."""
    kl_estimator: KlEstimator | None = None
    """Estimator of the KL term."""
    kl_in: KlPlace | None = None
    """Whether the KL term is added to the loss or subtracted from each token's reward."""
    kl_clamp: PositiveFloat | Literal["off"] | None = None
    """Bound on the estimator's absolute value per token; off for none."""
    kl_target: PositiveFloat | Literal["off"] | None = None
    """Mean KL per token that kl_coef is steered to from round to round; off for a fixed coefficient."""
    kl_horizon: PositiveFloat | None = None
    """Trajectories over which the steering takes effect."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus."""
    supervised_coef: NonNegativeFloat | None = None
    """Weight of the cross-entropy of trajectories whose reward is at least eval.success_reward."""
    value_clip: PositiveFloat | Literal["off"] | None = None
    """Bound on how far a value moves from the old one before its loss is clipped; off for none."""
    value_loss_coef: PositiveFloat | None = None
    """Weight of the value loss."""
    old_logprobs: Literal["auto", "current", "recompute", "behavior"] = "auto"
    """Denominator of the ratio: the current policy's own (one step per round), recomputed before the update,
    or the engine's. auto: current when a round has one step and nothing else needs them, else recompute."""
