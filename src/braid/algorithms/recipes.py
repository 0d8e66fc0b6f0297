"""Recipes: named combinations of algorithm parts.

Owns the table of recipes by name. A new recipe is one line here, as a change to the closest one; a new part
is one function in this package, with its name in braid.types. Does not import torch, so that resolving a
config is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from braid.types import (
    Advantage,
    AdvantageLevel,
    Aggregation,
    CorrectionLevel,
    CorrectionMeasure,
    CorrectionMode,
    CorrectionTokens,
    DecisionLevel,
    Divergence,
    KlEstimator,
    KlPlace,
    PolicyLoss,
    RatioLevel,
    RecipeName,
    RewardStatistics,
    TurnWeighting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One correction of the loss by w = exp(old - behavior). See config.algorithm.CorrectionConfig;
    `high=None`: no bound."""

    level: CorrectionLevel
    mode: CorrectionMode
    low: float
    high: float | None
    measure: CorrectionMeasure = "ratio"
    tokens: CorrectionTokens = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All settings of an algorithm, resolved. config.algorithm documents each field and its bounds.

    None means off, except for `aggregation_constant`: there it means that the plan derives the value.
    """

    reward_mean: RewardStatistics
    reward_std: RewardStatistics
    advantage: Advantage
    advantage_level: AdvantageLevel
    normalize_by_std: bool
    gamma: float
    gae_lambda: float
    episode_weight: float
    turn_weight: float
    reward_clip: float | None
    token_reward_clip: float | None
    whiten_rewards: bool
    whiten_advantages: bool
    advantage_clip: float | None
    mask_truncated: bool
    mask_long_failures: int | None
    logprob_level: DecisionLevel
    entropy_level: DecisionLevel
    policy_loss: PolicyLoss
    ratio_level: RatioLevel
    log_ratio_min: float | None
    log_ratio_max: float | None
    clip_low: float
    clip_high: float
    dual_clip: float | None
    sapo_tau_positive: float
    sapo_tau_negative: float
    topr_positive_weight: float
    topr_negative_weight: float
    kimi_tau: float
    cov_fraction: float
    cov_low: float
    cov_high: float
    cov_coef: float
    dppo_divergence: Divergence
    early_stop_ratio: float | None
    corrections: tuple[Correction, ...]
    aggregation: Aggregation
    aggregation_constant: float | None
    turn_weighting: TurnWeighting
    policy_loss_coef: float
    kl_coef: float
    kl_estimator: KlEstimator
    kl_in: KlPlace
    kl_clamp: float | None
    kl_target: float | None
    kl_horizon: float
    entropy_coef: float
    supervised_coef: float
    value_clip: float | None
    huber_delta: float | None
    value_loss_coef: float

    @property
    def counts_decisions(self) -> bool:
        """Whether the reduction of the policy loss counts decisions instead of tokens."""
        return self.logprob_level != "token" or self.turn_weighting == "turns"

    @property
    def values_turns(self) -> bool:
        """Whether a value is that of a turn instead of a token."""
        return self.advantage == "gae" and self.advantage_level == "turn"

    @property
    def full_kl_in(self) -> KlPlace | None:
        """Where KL over the whole vocabulary is used, if it is."""
        return self.kl_in if self.kl_coef > 0 and self.kl_estimator == "full" else None


# Shao et al. 2024, DeepSeekMath (arXiv 2402.03300): group baseline and standard deviation, k3 in the loss.
# Tokens are averaged over the step, not per answer, and the KL term is off, as in DAPO (arXiv 2503.14476).
# The bound of 10 on k3 is common practice.
_GRPO = Recipe(
    reward_mean="none",
    reward_std="none",
    advantage="grpo",
    advantage_level="trajectory",
    normalize_by_std=True,
    gamma=1.0,
    gae_lambda=1.0,
    episode_weight=1.0,
    turn_weight=1.0,
    reward_clip=None,
    token_reward_clip=None,
    whiten_rewards=False,
    whiten_advantages=False,
    advantage_clip=None,
    mask_truncated=False,
    mask_long_failures=None,
    logprob_level="token",
    entropy_level="token",
    policy_loss="ppo_clip",
    ratio_level="token",
    log_ratio_min=None,
    log_ratio_max=None,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    sapo_tau_positive=1.0,
    sapo_tau_negative=1.05,
    topr_positive_weight=1.0,
    topr_negative_weight=1.0,
    kimi_tau=0.1,
    cov_fraction=0.0002,
    cov_low=1.0,
    cov_high=5.0,
    cov_coef=1.0,
    dppo_divergence="tv",
    early_stop_ratio=None,
    corrections=(),
    aggregation="token_mean",
    aggregation_constant=None,
    turn_weighting="tokens",
    policy_loss_coef=1.0,
    kl_coef=0.0,
    kl_estimator="k3",
    kl_in="loss",
    kl_clamp=10.0,
    kl_target=None,
    kl_horizon=10_000.0,
    entropy_coef=0.0,
    supervised_coef=0.0,
    value_clip=0.2,
    huber_delta=None,
    value_loss_coef=1.0,
)

RECIPES: Mapping[RecipeName, Recipe] = {
    "grpo": _GRPO,
    # Schulman et al. 2017 (arXiv 1707.06347), as used for language models: whitening, value clip 0.2 and k1
    # in the reward from Huang et al. 2024 (arXiv 2403.17031); gamma = lambda = 1 from Hu et al. 2025 (arXiv
    # 2503.24290).
    "ppo": replace(_GRPO, advantage="gae", whiten_advantages=True, kl_estimator="k1", kl_in="reward"),
    # Liu et al. 2025 (arXiv 2503.20783): no division by the standard deviation or by the response length.
    "dr_grpo": replace(_GRPO, normalize_by_std=False, aggregation="token_sum_constant"),
    # Yu et al. 2025 (arXiv 2503.14476). Dynamic sampling is rollout.filter, the soft overlong penalty
    # reward.overlong.
    "dapo": replace(_GRPO, clip_high=0.28),
    # Zheng et al. 2025 (arXiv 2507.18071): sequence ratio, with the paper's narrow bounds.
    "gspo": replace(
        _GRPO,
        ratio_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence_mean_token_mean",
    ),
    # MiniMax 2025 (arXiv 2506.13585): every token keeps its gradient, with a bounded weight.
    "cispo": replace(_GRPO, policy_loss="cispo", clip_low=1.0, clip_high=4.0),
    # Gao et al. 2025 (arXiv 2511.20347): soft gate in place of the clip.
    "sapo": replace(_GRPO, policy_loss="sapo"),
    # Le Roux et al. 2025 (arXiv 2503.14286): no ratio for positive advantages, a ratio of at most 1 for the
    # others.
    "topr": replace(_GRPO, policy_loss="topr", reward_mean="group", advantage="reinforce"),
    # Cui et al. 2025 (arXiv 2505.22617): two ways to prevent entropy collapse.
    "clip_cov": replace(_GRPO, policy_loss="clip_cov"),
    "kl_cov": replace(_GRPO, policy_loss="kl_cov", cov_fraction=0.2),
    "dppo": replace(_GRPO, policy_loss="dppo"),
    # Hilton et al. 2021 (arXiv 2110.00641): clip against the policy before the update, weigh by its ratio to
    # the sampling engine, and mask tokens with a ratio above 5.
    "decoupled_ppo": replace(
        _GRPO,
        corrections=(
            Correction(level="token", mode="truncate", low=0.0, high=5.0),
            Correction(level="token", mode="mask", low=0.0, high=5.0),
        ),
    ),
    # Williams 1992, with the batch mean as baseline.
    "reinforce": replace(_GRPO, reward_mean="batch", advantage="reinforce", policy_loss="policy_gradient"),
    # Hu 2025 (arXiv 2501.03262): KL in the reward, advantages whitened over the round; the baseline variant
    # first subtracts the group mean.
    "reinforce_pp": replace(
        _GRPO, advantage="reinforce", whiten_advantages=True, kl_estimator="k1", kl_in="reward"
    ),
    "reinforce_pp_baseline": replace(
        _GRPO, reward_mean="group", advantage="reinforce", whiten_advantages=True, kl_estimator="k2"
    ),
    # Liu et al. 2025 (arXiv 2508.08221): group mean, standard deviation of the round.
    "lite_ppo": replace(_GRPO, reward_mean="group", reward_std="batch", advantage="reinforce"),
    # Ahmadian et al. 2024 (arXiv 2402.14740): leave-one-out mean of the group as baseline.
    "rloo": replace(_GRPO, advantage="rloo", policy_loss="policy_gradient"),
    # Li et al. 2023 (arXiv 2310.10505): reward of the greedy response as baseline.
    "remax": replace(_GRPO, advantage="remax", policy_loss="policy_gradient"),
    # Dong et al. 2023 (arXiv 2304.06767): imitate the best trajectory of each group.
    "raft": replace(_GRPO, advantage="raft", policy_loss="policy_gradient"),
    "maxrl": replace(_GRPO, advantage="maxrl"),
    # Feng et al. 2025 (arXiv 2505.10978): compares trajectories of a group, and turns that start in the same
    # state.
    "gigpo": replace(_GRPO, advantage="gigpo", gamma=0.95),
}

ADVANTAGE_KEYS: Mapping[Advantage, frozenset[str]] = {
    "grpo": frozenset({"normalize_by_std", "advantage_level"}),
    "gae": frozenset({"gamma", "gae_lambda", "advantage_level"}),
    "reinforce": frozenset({"gamma"}),
    "rloo": frozenset(),
    "remax": frozenset(),
    "raft": frozenset(),
    "maxrl": frozenset(),
    "gigpo": frozenset({"gamma", "normalize_by_std", "episode_weight", "turn_weight"}),
}

COMPARING_ADVANTAGES: frozenset[Advantage] = frozenset({"grpo", "rloo", "raft", "maxrl", "gigpo"})
"""Advantages that compare the trajectories of a group."""

_RATIO_KEYS = frozenset({"ratio_level", "log_ratio_min", "log_ratio_max"})
POLICY_LOSS_KEYS: Mapping[PolicyLoss, frozenset[str]] = {
    "ppo_clip": _RATIO_KEYS | {"clip_low", "clip_high", "dual_clip"},
    "policy_gradient": frozenset(),
    "importance_sampling": _RATIO_KEYS,
    "masked_is": _RATIO_KEYS | {"clip_low", "clip_high"},
    "cispo": _RATIO_KEYS | {"clip_low", "clip_high"},
    "sapo": _RATIO_KEYS | {"sapo_tau_positive", "sapo_tau_negative"},
    "topr": _RATIO_KEYS | {"topr_positive_weight", "topr_negative_weight"},
    "kimi": frozenset({"kimi_tau"}),
    "clip_cov": _RATIO_KEYS | {"clip_low", "clip_high", "cov_fraction", "cov_low", "cov_high"},
    "kl_cov": _RATIO_KEYS | {"cov_fraction", "cov_coef"},
    "dppo": _RATIO_KEYS | {"clip_low", "clip_high", "dppo_divergence"},
    "cross_entropy": frozenset(),
}
"""Recipe fields that each policy loss reads, in addition to those that all losses read."""

CHOOSING_LOSSES: frozenset[PolicyLoss] = frozenset({"clip_cov", "kl_cov"})
"""Losses that act on tokens selected by old_logprobs, which therefore must be available before the update."""
