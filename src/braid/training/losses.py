"""Losses as the backends take them, composed of the parts that a recipe names.

Owns the composition and the metrics that come with it (names without their role: report/names.py says what each means).
The formulas are in algorithms/.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from braid.algorithms.aggregate import aggregate
from braid.algorithms.kl import kl_estimate
from braid.algorithms.policy_loss import policy_gradient, ppo_clip
from braid.algorithms.recipes import Recipe
from braid.algorithms.value_loss import value_loss
from braid.models.batch import PackedBatch

from .backend import Diagnostics, Loss


def policy_loss(recipe: Recipe) -> Loss:
    """Surrogate + kl_coef * KL, when it is in the loss, - entropy_coef * entropy.

    Reads the fields `advantages`; `old_logprobs`, without which the policy is its own old one; `ref_logprobs`, needed for KL
    in the loss; `behavior_logprobs`, for the metrics of how far engine and trainer are apart (taken at the old log-probs,
    so nothing where those are the engine's own).
    """
    return Loss(frozenset({"logprobs", "entropy"}), partial(_policy_loss, recipe))


def value_loss_of(recipe: Recipe) -> Loss:
    """value_loss_coef * the critic's loss. Reads the fields `values` (of the critic before the update) and `returns`."""
    return Loss(frozenset({"values"}), partial(_value_loss, recipe))


def supervised_loss() -> Loss:
    """Cross-entropy of the tokens where the mask is True."""
    return Loss(frozenset({"logprobs"}), _supervised_loss)


def _policy_loss(
    recipe: Recipe, outputs: dict[str, Tensor], batch: PackedBatch
) -> tuple[Tensor, Diagnostics]:
    logprobs, entropy, fields = outputs["logprobs"], outputs["entropy"], batch.fields
    old = fields.get("old_logprobs", logprobs.detach())
    means: dict[str, Tensor] = {"entropy": entropy.detach()}
    maxima: dict[str, Tensor] = {}
    if recipe.policy_loss == "ppo_clip":
        per_token, diagnostics = ppo_clip(
            logprobs,
            old,
            fields["advantages"],
            clip_low=recipe.clip_low,
            clip_high=recipe.clip_high,
            dual_clip=recipe.dual_clip,
        )
        ratio = diagnostics.pop("ratio")
        means |= diagnostics | {"ratio_mean": ratio}
        maxima["ratio_max"] = ratio
    else:
        per_token = policy_gradient(logprobs, fields["advantages"])
    if "ref_logprobs" in fields:
        kl = kl_estimate(
            logprobs, fields["ref_logprobs"], estimator=recipe.kl_estimator, clamp=recipe.kl_clamp
        )
        means["kl"] = kl.detach()
        if recipe.kl_in == "loss":
            per_token = per_token + recipe.kl_coef * kl
    else:
        assert recipe.kl_coef == 0 or recipe.kl_in == "reward", "KL in the loss needs ref_logprobs"
    if recipe.entropy_coef:
        per_token = per_token - recipe.entropy_coef * entropy
    if "behavior_logprobs" in fields:
        behavior = fields["behavior_logprobs"]
        means["logprob_mismatch_kl"] = kl_estimate(behavior, old, estimator="k3", clamp=None)
        maxima["logprob_mismatch_max"] = (old - behavior).abs()
    return _reduced(per_token, batch), _diagnostics("policy", batch.mask, means, maxima)


def _value_loss(recipe: Recipe, outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
    values, old, returns = outputs["values"], batch.fields["values"], batch.fields["returns"]
    per_token = recipe.value_loss_coef * value_loss(values, old, returns, clip=recipe.value_clip)
    means = {"value_mean": values.detach(), "return_mean": returns}
    if recipe.value_clip is not None:
        means["clip_fraction"] = ((values.detach() - old).abs() > recipe.value_clip).float()
    return _reduced(per_token, batch), _diagnostics("critic", batch.mask, means)


def _supervised_loss(outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
    logprobs = outputs["logprobs"]
    means = {"token_probability": logprobs.detach().exp()}
    return _reduced(-logprobs, batch), _diagnostics("sft", batch.mask, means)


def _reduced(per_token: Tensor, batch: PackedBatch) -> Tensor:
    assert batch.weights is not None, "training batches carry weights"
    return aggregate(per_token, batch.mask, batch.weights)


def _diagnostics(
    role: str, mask: Tensor, means: dict[str, Tensor], maxima: dict[str, Tensor] | None = None
) -> Diagnostics:
    """Over the positions of the mask; sums in float64, so that they do not depend on order."""
    count = mask.sum()
    return Diagnostics(
        {f"{role}/{name}": (x.where(mask, 0).sum(dtype=torch.float64), count) for name, x in means.items()},
        {f"{role}/{name}": x.where(mask, -torch.inf).amax() for name, x in (maxima or {}).items()},
    )
