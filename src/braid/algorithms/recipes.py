"""Recipes: named combinations of algorithm parts.

Owns the table from a name to its parts. A new recipe is one line here, as a change to the nearest one; a new
part is one function beside this file, with its name in braid.types. Imports no torch, so that a plan is
cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from braid.types import Advantage, Aggregation, KlEstimator, KlPlace, PolicyLoss, RecipeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Every part of an algorithm, concrete. The meaning and bounds of each are those of config.algorithm.

    None means off, but for `aggregation_constant`, where it means that the plan derives it.
    """

    advantage: Advantage
    normalize_by_std: bool
    gamma: float
    gae_lambda: float
    whiten_advantages: bool
    policy_loss: PolicyLoss
    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: Aggregation
    aggregation_constant: float | None
    kl_coef: float
    kl_estimator: KlEstimator
    kl_in: KlPlace
    kl_clamp: float | None
    entropy_coef: float
    value_clip: float | None
    value_loss_coef: float


# Shao et al. 2024, DeepSeekMath (arXiv 2402.03300): group baseline and standard deviation, k3 in the loss.
# Tokens are averaged over the step, not per answer, and the KL term is off, as in DAPO (arXiv 2503.14476).
# The bound of 10 on k3 is customary.
_GRPO = Recipe(
    advantage="grpo",
    normalize_by_std=True,
    gamma=1.0,
    gae_lambda=1.0,
    whiten_advantages=False,
    policy_loss="ppo_clip",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    aggregation="token_mean",
    aggregation_constant=None,
    kl_coef=0.0,
    kl_estimator="k3",
    kl_in="loss",
    kl_clamp=10.0,
    entropy_coef=0.0,
    value_clip=0.2,
    value_loss_coef=1.0,
)

RECIPES: Mapping[RecipeName, Recipe] = {
    "grpo": _GRPO,
    # Schulman et al. 2017 (arXiv 1707.06347), as language models are trained with it: whitening, value clip
    # 0.2 and k1 in the reward from Huang et al. 2024 (arXiv 2403.17031); gamma = lambda = 1 from Hu et al.
    # 2025 (arXiv 2503.24290).
    "ppo": replace(_GRPO, advantage="gae", whiten_advantages=True, kl_estimator="k1", kl_in="reward"),
}
