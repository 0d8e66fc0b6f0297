"""The algorithm: a named recipe, and every component of it that can be overridden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from braid.algorithms.advantages import ADVANTAGES, Advantage
from braid.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from braid.algorithms.recipes import RECIPES, Recipe, RecipeName
from braid.sections import Section, Unused
from braid.types import (
    Aggregation,
    CorrectionLevel,
    CorrectionMeasure,
    CorrectionMode,
    CorrectionTokens,
    DecisionLevel,
    KlEstimator,
    KlPlace,
    KlRest,
    RewardStatistics,
    TurnWeighting,
)

from .kinds import KindOf

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig

    AdvantageKind = Advantage
    PolicyLossKind = PolicyLoss
else:
    AdvantageKind = KindOf(Advantage, ADVANTAGES, lambda others: _recipe(others).advantage.kind).field()
    PolicyLossKind = KindOf(
        PolicyLoss, POLICY_LOSSES, lambda others: _recipe(others).policy_loss.kind
    ).field()


def _recipe(others: Mapping[str, Any]) -> Recipe:
    """The recipe that a section names; the default one if it names none that exists."""
    return RECIPES.get(others.get("recipe", ""), Recipe())


class CorrectionConfig(Section):
    """One importance correction of the loss for the mismatch between sampling engine and trainer: w =
    exp(old_logprob - behavior_logprob)."""

    level: CorrectionLevel = "token"
    """Level at which w is computed: per token; the product over a turn or a sequence; or the geometric mean
    over a turn (turn_geometric) or a sequence (geometric)."""
    mode: CorrectionMode = "truncate"
    """truncate: multiply the loss by w clamped to [low, high]. mask: exclude tokens whose w is outside these
    bounds. mask_sequence: exclude every sequence that contains such a token."""
    low: float = 0.0
    """Lower bound of w."""
    high: PositiveFloat | Literal["off"] = 2.0
    """Upper bound of w; off for none."""
    measure: CorrectionMeasure = "ratio"
    """ratio: w as defined above. difference (masks only): the difference of a token's two probabilities, old
    - behavior, summed over the turn or sequence, or averaged for geometric levels."""
    tokens: CorrectionTokens = "all"
    """Tokens over which w of a turn or sequence is computed: all, or those kept by the preceding masks."""

    @model_validator(mode="after")
    def _bounds(self) -> CorrectionConfig:
        if self.high != "off" and self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}; lower it")
        if self.measure == "ratio" and self.low < 0:
            raise ValueError(f"low={self.low:g} is negative, but ratios are positive; set it to 0 or more")
        if self.measure == "difference" and self.mode == "truncate":
            raise ValueError(
                "mode=truncate needs a ratio as the weight, not measure=difference; set mode to mask or "
                "mask_sequence"
            )
        return self


class AlgorithmConfig(Section):
    """The algorithm. Keys left null are set by the recipe (`braid show` prints the result)."""

    recipe: RecipeName = "grpo"
    """Named algorithm, which sets the defaults of the keys below."""
    reward_mean: RewardStatistics | None = None
    """Mean subtracted from each trajectory's reward before advantages are computed: of its group, of the
    round's trajectories with its prompt's source, of the round (batch), of all rounds so far (running), or
    none."""
    reward_std: RewardStatistics | None = None
    """Standard deviation by which rewards are then divided, with the same choices; 0 counts as 1."""
    advantage: AdvantageKind | None = None
    """Advantage: a kind, its settings, or both; or the path of your own. Settings that are not set are those
    of the recipe, or of the kind if it is another."""
    reward_clip: PositiveFloat | Literal["off"] | None = None
    """Bound on the absolute value of a trajectory's reward, applied after reward_mean and reward_std and
    before KL; off for none."""
    token_reward_clip: PositiveFloat | Literal["off"] | None = None
    """Bound on each position's absolute reward, applied after KL and before whiten_rewards; off for none."""
    whiten_rewards: bool | None = None
    """Normalize per-position rewards to mean 0 and variance 1 over the round's valid positions."""
    whiten_advantages: bool | None = None
    """Normalize advantages to mean 0 and variance 1 over the round's valid positions."""
    advantage_clip: PositiveFloat | Literal["off"] | None = None
    """Bound on the absolute value of an advantage, applied after whitening; off for none."""
    mask_truncated: bool | None = None
    """Exclude truncated trajectories from the loss and its denominators, but not from group statistics."""
    mask_long_failures: PositiveInt | Literal["off"] | None = None
    """Exclude trajectories of at least this many policy tokens whose unshaped reward is 0 or less from the
    loss and its denominators (they still count in their group's statistics); off for none."""
    reward_level: Literal["chunk", "action"] = "chunk"
    """Robots with gae: returns and values of action chunks, or of actions, with a critic that has a value for
    each action of a chunk; gamma and gae_lambda are then per action. action needs a logprob_level of action
    or token."""
    logprob_level: DecisionLevel | None = None
    """Level of the log-probs in the policy loss: of a token; or of a decision, the sum over its tokens, which
    then counts once in the aggregation. A decision in text is a turn (action and chunk are the same). Robots:
    of a token or a component of an action (the default of OpenVLA), of an action (of perceptrons), or of a
    chunk of actions (of pi0)."""
    entropy_level: DecisionLevel | None = None
    """Level of the entropy bonus: the entropy of a token, or of a decision, the sum over its tokens. Robots:
    by default that of logprob_level; of a finer one it is the mean over what a log-prob is of."""
    policy_loss: PolicyLossKind | None = None
    """Policy loss (surrogate objective): a kind, its settings, or both; or the path of your own. Settings
    that are not set are those of the recipe, or of the kind if it is another."""
    early_stop_ratio: PositiveFloat | Literal["off"] | None = None
    """Skip optimizer steps whose mean ratio exceeds this; off for none."""
    corrections: tuple[CorrectionConfig, ...] | None = None
    """Corrections for the mismatch between the engine's and the trainer's log-probs, applied in order. null:
    those of the recipe; if it has none, one of the default form with pipeline.max_lag above 0, and where the
    native engine samples in a lower precision than that of training. []: none."""
    aggregation: Aggregation | None = None
    """How per-token losses are reduced to a scalar; denominators cover the whole optimizer step."""
    aggregation_constant: PositiveFloat | None = None
    """token_sum_constant: divisor per sequence; null for the longest possible response."""
    turn_weighting: TurnWeighting | None = None
    """What the aggregation of the policy loss counts: tokens, or turns, each the mean over its tokens."""
    policy_loss_coef: NonNegativeFloat | None = None
    """Weight of the policy loss and the KL term relative to the entropy and supervised terms."""
    kl_coef: NonNegativeFloat | None = None
    """Weight of the KL penalty against the reference model; with 0 no reference is loaded."""
    kl_estimator: KlEstimator | None = None
    """Estimator of the KL divergence: from the log-probs of sampled tokens, or the exact sum over the
    vocabulary at each position, which needs the reference in the policy's processes (not with Megatron): full
    is KL(policy | reference), full_forward KL(reference | policy), full_jensen_shannon the mean of both's KL
    to their mixture, with the weights of kl_mixture."""
    kl_mixture: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """full_jensen_shannon: weight of the reference in the mixture, and of its KL (beta of GKD); 0 is
    full_forward, 1 is full."""
    kl_top_k: PositiveInt | None = None
    """Compare distributions over the reference's k likeliest tokens only, whose log-probs it computes before
    the update: it may then run in other processes than the policy. null: over the whole vocabulary."""
    kl_rest: KlRest = "tail"
    """What becomes of the tokens beyond kl_top_k. tail: they are one event more; renormalize: both
    distributions are divided by their sums over the k tokens; drop: nothing."""
    kl_ratio_clip: PositiveFloat | Literal["off"] | None = None
    """Multiply each token's KL in the loss by the policy's ratio to that before the update, at most this and
    without a gradient (SDPO); off for no factor."""
    kl_in: KlPlace | None = None
    """Whether the KL penalty is added to the loss, or subtracted from each token's reward, from which
    advantages are computed, or from each token's advantage: then it is not credited to earlier tokens, nor
    learned by a critic."""
    kl_clamp: PositiveFloat | Literal["off"] | None = None
    """Bound on the estimator's absolute value per token; off for none."""
    kl_target: PositiveFloat | Literal["off"] | None = None
    """Target of the mean KL per token for a kl_coef that adapts every round; off for a fixed coefficient."""
    kl_horizon: PositiveFloat | None = None
    """Horizon of the adaptive kl_coef, in trajectories."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus."""
    supervised_coef: NonNegativeFloat | None = None
    """Weight of the cross-entropy loss on trajectories whose reward is at least eval.success_reward."""
    value_clip: PositiveFloat | Literal["off"] | None = None
    """Largest change of a value from its old value before the value loss is clipped; off for none. In units
    of the standard deviation of returns with critic.normalize_values, else of the reward."""
    huber_delta: PositiveFloat | Literal["off"] | None = None
    """Value errors beyond this count linearly (Huber loss), in the units of value_clip; off for the squared
    error."""
    value_loss_coef: PositiveFloat | None = None
    """Weight of the value loss."""
    old_logprobs: Literal["auto", "current", "recompute", "behavior", "interpolated"] = "auto"
    """Denominator of the ratio: the current policy's log-probs (one step per round), recomputed before the
    update, the engine's (behavior), or interpolated between the engine's and the current ones by the age of a
    token's weights, which is the same as behavior as long as rounds are sampled with the weights that they
    start from. auto: current when a round has one step and nothing else needs them, else recompute."""

    only_for_training: ClassVar[str] = "algorithm.*"

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        recipe, old_logprobs = plan.recipe, f"with algorithm.old_logprobs={plan.old_logprobs}"
        if not plan.learns_values:
            why = "the advantage uses no critic"
            yield why, "algorithm.{value_clip,huber_delta,value_loss_coef}"
        if plan.old_logprobs == "behavior":
            yield f"{old_logprobs} there is nothing to correct", "algorithm.corrections"
            yield f"{old_logprobs} ratios are to the engine already", "algorithm.policy_loss.ratio_to"
        if plan.old_logprobs == "interpolated" and not config.max_lag:
            yield (
                "rounds are sampled with the weights that they start from, so interpolated log-probs are the "
                "engine's",
                "algorithm.corrections",
            )
        if plan.old_logprobs == "current":
            keys = (
                "kl_ratio_clip" if recipe.policy_loss.compares_sampler else "{early_stop_ratio,kl_ratio_clip}"
            )
            yield f"{old_logprobs} all ratios are 1", f"algorithm.{keys}"
        has_chunks = config.env.is_simulator and config.model.num_action_chunks > 1
        if not (has_chunks and plan.learns_values):
            yield "only values of chunks of several actions depend on it", "algorithm.reward_level"
        if all(correction.level == "token" for correction in self.corrections or ()):
            yield "token-level weights depend on a single token", "algorithm.corrections[].tokens"
        yield from _unused_statistics(recipe)
        if recipe.aggregation != "token_sum_constant":
            why = "algorithm.aggregation is not token_sum_constant"
            yield why, "algorithm.aggregation_constant"
        if recipe.logprob_level != "token":
            yield "algorithm.logprob_level is not token", "algorithm.turn_weighting"
        if recipe.entropy_coef == 0:
            yield "algorithm.entropy_coef is 0", "algorithm.entropy_level"
        if recipe.kl_coef == 0:
            names = (
                "kl_estimator,kl_mixture,kl_top_k,kl_rest,kl_ratio_clip,kl_in,kl_clamp,kl_target,kl_horizon"
            )
            keys = f"algorithm.{{{names}}}"
            yield "algorithm.kl_coef is 0", keys
        else:
            yield from _unused_kl(recipe)
        if recipe.kl_target is None:
            yield "algorithm.kl_target is off", "algorithm.kl_horizon"


def _unused_kl(recipe: Recipe) -> Unused:
    """Keys of a KL term that its estimator or place does not read."""
    estimator = f"algorithm.kl_estimator is {recipe.kl_estimator}"
    if recipe.kl_estimator != "full_jensen_shannon":
        yield f"{estimator}, which has no mixture", "algorithm.kl_mixture"
    if not recipe.compares_distributions:
        yield f"{estimator}, which reads sampled tokens alone", "algorithm.{kl_top_k,kl_rest}"
    elif recipe.kl_top_k is None:
        yield "the whole vocabulary is compared (algorithm.kl_top_k is null)", "algorithm.kl_rest"
    if recipe.kl_in != "loss":
        yield f"the KL is not in the loss (algorithm.kl_in is {recipe.kl_in})", "algorithm.kl_ratio_clip"


def _unused_statistics(recipe: Recipe) -> Unused:
    if recipe.whiten_rewards:  # over positions, so a constant subtracted at one of them matters
        return
    if recipe.advantage.ignores_reward_mean:
        why = "advantages are differences within a group, so a constant subtracted from its rewards cancels"
        yield why, "algorithm.reward_mean"
    if recipe.advantage.ignores_reward_scale and not (recipe.kl_coef > 0 and recipe.kl_in == "reward"):
        why = f"{recipe.advantage.kind} only compares rewards, so their scale does not matter"
        yield why, "algorithm.reward_std"
