"""The algorithm: a recipe by name, and every part of it that can be set apart."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from braid.types import (
    Advantage,
    AdvantageLevel,
    Aggregation,
    CorrectionLevel,
    CorrectionMeasure,
    CorrectionMode,
    CorrectionTokens,
    Divergence,
    KlEstimator,
    KlPlace,
    PolicyLoss,
    RatioLevel,
    RecipeName,
    RewardStatistics,
    TurnWeighting,
)

from .base import Section


class CorrectionConfig(Section):
    """One correction of the loss for what separates the sampler from the trainer: w = exp(old - behavior)."""

    level: CorrectionLevel = "token"
    """What w is taken over: each token; the product over a turn or a sequence; or the geometric mean over a turn
    (turn_geometric) or a sequence (geometric)."""
    mode: CorrectionMode = "truncate"
    """truncate: the loss is multiplied by w clamped to [low, high]. mask: tokens with w outside them are left out.
    mask_sequence: a sequence with any such token is left out whole."""
    low: float = 0.0
    """Lower bound of w."""
    high: PositiveFloat | Literal["off"] = 2.0
    """Upper bound of w; off for none."""
    measure: CorrectionMeasure = "ratio"
    """ratio: w as above. difference, for masks: the difference of the two probabilities of a token, old - behavior, summed
    over the turn or sequence, or its mean where the level is geometric."""
    tokens: CorrectionTokens = "all"
    """Tokens that w of a turn or a sequence is taken over: all of them, or those that the masks before this one kept."""

    @model_validator(mode="after")
    def _bounds(self) -> CorrectionConfig:
        if self.high != "off" and self.low > self.high:
            raise ValueError(f"low={self.low:g} is more than high={self.high:g}; lower it")
        if self.measure == "ratio" and self.low < 0:
            raise ValueError(f"low={self.low:g} is negative, and a ratio is not; set it to 0 or more")
        if self.measure == "difference" and self.mode == "truncate":
            raise ValueError(
                "measure=difference bounds a difference of probabilities, which is no weight; set mode to mask or "
                "mask_sequence"
            )
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
    reward_clip: PositiveFloat | Literal["off"] | None = None
    """Bound on the absolute value of a trajectory's reward, after reward_mean and reward_std and before KL; off for none."""
    token_reward_clip: PositiveFloat | Literal["off"] | None = None
    """Bound on the absolute value of each position's reward, after KL and before whiten_rewards; off for none."""
    whiten_rewards: bool | None = None
    """Shift and scale per-position rewards to mean 0 and variance 1 over the round's valid positions."""
    whiten_advantages: bool | None = None
    """Shift and scale advantages to mean 0 and variance 1 over the round's valid positions."""
    advantage_clip: PositiveFloat | Literal["off"] | None = None
    """Bound on an advantage's absolute value, after whitening; off for none."""
    mask_truncated: bool | None = None
    """Leave trajectories that a limit cut off out of the loss and its denominators (they still count in their group's
    statistics)."""
    mask_long_failures: PositiveInt | Literal["off"] | None = None
    """Leave trajectories of at least this many policy tokens whose reward, before shaping, is 0 or less out of the loss and
    its denominators (they still count in their group's statistics); off for none."""
    reward_level: Literal["chunk", "action"] = "chunk"
    """Robots: rewards and advantages per chunk of actions, or per action."""
    logprob_level: Literal["token", "action", "chunk"] = "token"
    """Robots: what a ratio is of."""
    entropy_level: Literal["token", "action", "chunk"] = "token"
    """Robots: what entropy is taken of."""
    policy_loss: PolicyLoss | None = None
    """Surrogate."""
    ratio_level: RatioLevel | None = None
    """What a ratio is of: a token; the geometric mean over its turn or its sequence (GSPO); or the product over them, the ratio
    of the whole turn or sequence (turn_product, sequence_product)."""
    log_ratio_min: Annotated[float, Field(le=0.0)] | Literal["off"] | None = None
    """Lower bound on the log of a ratio, before any clipping; below it a token has no gradient. off for -20."""
    log_ratio_max: NonNegativeFloat | Literal["off"] | None = None
    """Upper bound on the log of a ratio, before any clipping; above it a token has no gradient. off for 20."""
    clip_low: NonNegativeFloat | None = None
    """Ratios below 1 - clip_low are clipped (masked_is: left out). dppo: the bound on the divergence where the ratio
    falls."""
    clip_high: NonNegativeFloat | None = None
    """Ratios above 1 + clip_high are clipped (masked_is: left out). dppo: the bound on the divergence where the ratio
    rises."""
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
    kimi_tau: NonNegativeFloat | None = None
    """kimi: weight of the squared distance from the old log-prob."""
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
    turn_weighting: TurnWeighting | None = None
    """How the turns of a trajectory count in the policy's loss: by their tokens, or all alike (turns)."""
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
    """Bound on how far a value moves from the old one before its loss is clipped; off for none. In units of the deviation of
    returns with critic.normalize_values, else of reward."""
    huber_delta: PositiveFloat | Literal["off"] | None = None
    """Errors of values beyond this count linearly, in the units of value_clip; off for squared errors throughout."""
    value_loss_coef: PositiveFloat | None = None
    """Weight of the value loss."""
    old_logprobs: Literal["auto", "current", "recompute", "behavior"] = "auto"
    """Denominator of the ratio: the current policy's own (one step per round), recomputed before the update,
    or the engine's. auto: current when a round has one step and nothing else needs them, else recompute."""
