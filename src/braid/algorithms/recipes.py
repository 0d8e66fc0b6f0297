"""Recipes: named combinations of algorithm parts.

Owns the table of recipes, whose names are those of a config. Does not import torch, so that resolving a
config is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
    TiledDivergence,
    TurnWeighting,
)

from .advantages import Advantage
from .advantages.gae import Gae
from .advantages.gdpo import Gdpo
from .advantages.gigpo import Gigpo
from .advantages.gpg import Gpg
from .advantages.grpo import Grpo
from .advantages.maxrl import MaxRl
from .advantages.opo import Opo
from .advantages.pass_at_k import PassAtK
from .advantages.raft import Raft
from .advantages.reinforce import Reinforce
from .advantages.remax import Remax
from .advantages.rloo import Rloo
from .policy_losses import PolicyLoss
from .policy_losses.cispo import Cispo
from .policy_losses.clip_cov import ClipCov
from .policy_losses.dppo import Dppo
from .policy_losses.gmpo import Gmpo
from .policy_losses.gspo import Gspo
from .policy_losses.kl_cov import KlCov
from .policy_losses.policy_gradient import PolicyGradient
from .policy_losses.ppo_clip import PpoClip
from .policy_losses.sapo import Sapo
from .policy_losses.sequence_mask import SequenceMask
from .policy_losses.topr import Topr
from .policy_losses.vespo import Vespo

if TYPE_CHECKING:
    RecipeName = str


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

    The defaults are GRPO (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300): group baseline and standard
    deviation, k3 in the loss. Tokens are averaged over the step, not per answer, and the KL term is off, as
    in DAPO (arXiv 2503.14476). The bound of 10 on k3 is common practice.
    """

    reward_mean: RewardStatistics = "none"
    reward_std: RewardStatistics = "none"
    advantage: Advantage = Grpo()  # noqa: RUF009  # immutable
    reward_clip: float | None = None
    token_reward_clip: float | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    advantage_clip: float | None = None
    mask_truncated: bool = False
    mask_long_failures: int | None = None
    logprob_level: DecisionLevel = "token"
    entropy_level: DecisionLevel = "token"
    policy_loss: PolicyLoss = PpoClip()  # noqa: RUF009  # immutable
    early_stop_ratio: float | None = None
    corrections: tuple[Correction, ...] = ()
    aggregation: Aggregation = "token_mean"
    aggregation_constant: float | None = None
    turn_weighting: TurnWeighting = "tokens"
    policy_loss_coef: float = 1.0
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_mixture: float = 0.5
    kl_top_k: int | None = None
    kl_rest: KlRest = "tail"
    kl_ratio_clip: float | None = None
    kl_in: KlPlace = "loss"
    kl_clamp: float | None = 10.0
    kl_target: float | None = None
    kl_horizon: float = 10_000.0
    entropy_coef: float = 0.0
    supervised_coef: float = 0.0
    value_clip: float | None = 0.2
    huber_delta: float | None = None
    value_loss_coef: float = 1.0

    @property
    def counts_decisions(self) -> bool:
        """Whether the reduction of the policy loss counts decisions instead of tokens."""
        return self.logprob_level != "token" or self.turn_weighting == "turns"

    @property
    def value_level(self) -> Literal["token", "action", "turn"]:
        """What a value and a return are those of: a token, a robot's action, or a turn."""
        return self.advantage.value_level

    @property
    def has_kl_before_update(self) -> bool:
        """Whether the KL penalty is part of the rewards or advantages."""
        return self.kl_coef > 0 and self.kl_in != "loss"

    @property
    def compares_distributions(self) -> bool:
        """Whether the KL is a divergence of distributions, and not of the log-probs of sampled tokens."""
        return self.kl_coef > 0 and self.kl_estimator in FULL_DIVERGENCES

    @property
    def full_kl_in(self) -> KlPlace | None:
        """Where a divergence over the whole vocabulary is used, if it is."""
        return self.kl_in if self.compares_distributions and self.kl_top_k is None else None

    @property
    def divergence(self) -> TiledDivergence:
        """The divergence, where `compares_distributions`."""
        return FULL_DIVERGENCES[self.kl_estimator]


FULL_DIVERGENCES: Mapping[str, TiledDivergence] = {
    "full": "kl",
    "full_forward": "forward_kl",
    "full_jensen_shannon": "jensen_shannon",
}
"""Estimators that compare whole distributions -> the model's output."""

NO_RECIPE = Recipe(advantage=Reinforce())
"""Stands for the recipe of a run off-policy, which reads none: without values, a reference, or comparisons
in groups."""
RECIPES: Mapping[str, Recipe] = {
    "grpo": Recipe(),
    # Schulman et al. 2017 (arXiv 1707.06347), as used for language models: whitening, value clip 0.2 and k1
    # in the reward from Huang et al. 2024 (arXiv 2403.17031); gamma = lambda = 1 from Hu et al. 2025 (arXiv
    # 2503.24290).
    "ppo": Recipe(advantage=Gae(), whiten_advantages=True, kl_estimator="k1", kl_in="reward"),
    # Liu et al. 2025 (arXiv 2503.20783): no division by the standard deviation or by the response length.
    "dr_grpo": Recipe(advantage=Grpo(normalize_by_std=False), aggregation="token_sum_constant"),
    # Yu et al. 2025 (arXiv 2503.14476). Dynamic sampling is rollout.filter, the soft overlong penalty
    # reward.overlong.
    "dapo": Recipe(policy_loss=PpoClip(clip_high=0.28)),
    # Zheng et al. 2025 (arXiv 2507.18071): sequence ratio, with the paper's narrow bounds.
    "gspo": Recipe(policy_loss=Gspo(), aggregation="sequence_mean_token_mean"),
    # arXiv 2602.05261: gspo without its bias towards short responses: sequences weigh by their length.
    "luspo": Recipe(policy_loss=Gspo(), aggregation="sequence_mean_token_sum"),
    # Zhao et al. 2025 (arXiv 2507.20673): the geometric mean of token ratios, with wide bounds for each.
    "gmpo": Recipe(policy_loss=Gmpo(), aggregation="sequence_mean_token_mean"),
    # arXiv 2602.10693: a soft weight of the ratio of whole sequences, for old samples.
    "vespo": Recipe(policy_loss=Vespo()),
    # MiniMax 2025 (arXiv 2506.13585): every token keeps its gradient, with a bounded weight.
    "cispo": Recipe(policy_loss=Cispo()),
    # Gao et al. 2025 (arXiv 2511.20347): soft gate in place of the clip.
    "sapo": Recipe(policy_loss=Sapo()),
    # Le Roux et al. 2025 (arXiv 2503.14286): no ratio for positive advantages, a ratio of at most 1 for the
    # others.
    "topr": Recipe(policy_loss=Topr(), reward_mean="group", advantage=Reinforce()),
    # DeepSeek-AI 2025 (arXiv 2512.02556): no gradient from bad answers that the policy has moved away from.
    "sequence_mask": Recipe(policy_loss=SequenceMask()),
    # Cui et al. 2025 (arXiv 2505.22617): two ways to prevent entropy collapse.
    "clip_cov": Recipe(policy_loss=ClipCov()),
    "kl_cov": Recipe(policy_loss=KlCov()),
    "dppo": Recipe(policy_loss=Dppo()),
    # Hilton et al. 2021 (arXiv 2110.00641): clip against the policy before the update, weigh by its ratio to
    # the sampling engine, and mask tokens with a ratio above 5.
    "decoupled_ppo": Recipe(
        corrections=(
            Correction(level="token", mode="truncate", low=0.0, high=5.0),
            Correction(level="token", mode="mask", low=0.0, high=5.0),
        ),
    ),
    # Williams 1992, with the batch mean as baseline.
    "reinforce": Recipe(reward_mean="batch", advantage=Reinforce(), policy_loss=PolicyGradient()),
    # Hu 2025 (arXiv 2501.03262): KL in the reward, advantages whitened over the round; the baseline variant
    # first subtracts the group mean.
    "reinforce_pp": Recipe(advantage=Reinforce(), whiten_advantages=True, kl_estimator="k1", kl_in="reward"),
    "reinforce_pp_baseline": Recipe(
        reward_mean="group", advantage=Reinforce(), whiten_advantages=True, kl_estimator="k2"
    ),
    # Liu et al. 2025 (arXiv 2508.08221): group mean, standard deviation of the round.
    "lite_ppo": Recipe(reward_mean="group", reward_std="batch", advantage=Reinforce()),
    # Ahmadian et al. 2024 (arXiv 2402.14740): leave-one-out mean of the group as baseline.
    "rloo": Recipe(advantage=Rloo(), policy_loss=PolicyGradient()),
    # Li et al. 2023 (arXiv 2310.10505): reward of the greedy response as baseline.
    "remax": Recipe(advantage=Remax(), policy_loss=PolicyGradient()),
    # Dong et al. 2023 (arXiv 2304.06767): imitate the best trajectory of each group.
    "raft": Recipe(advantage=Raft(), policy_loss=PolicyGradient()),
    "maxrl": Recipe(advantage=MaxRl()),
    # Hao et al. 2025 (arXiv 2505.23585): exactly on-policy, with the baseline of least variance.
    "opo": Recipe(advantage=Opo(), policy_loss=PolicyGradient()),
    # Chu et al. 2025 (arXiv 2504.02546): the plain policy gradient, rescaled for groups without signal.
    "gpg": Recipe(advantage=Gpg(), policy_loss=PolicyGradient()),
    # Chen et al. 2025 (arXiv 2508.10751): rewards sets of k answers with a right one among them.
    "pass_at_k": Recipe(advantage=PassAtK()),
    # Liu et al. 2026 (arXiv 2601.05242): normalises reward parts one by one, then their sum over the round.
    "gdpo": Recipe(advantage=Gdpo(), whiten_advantages=True),
    # Feng et al. 2025 (arXiv 2505.10978): compares trajectories of a group, and turns that start in the same
    # state.
    "gigpo": Recipe(advantage=Gigpo()),
}

if not TYPE_CHECKING:
    RecipeName = Literal[tuple(RECIPES)]
