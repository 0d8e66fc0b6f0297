"""Losses for the training backends, composed from the terms that a recipe selects.

Owns the composition and the metrics of each loss (report/names.py documents the metrics). The formulas are in
algorithms/.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from braid.algorithms.aggregate import aggregate
from braid.algorithms.corrections import correction_factor, proximal_logprobs, sampling_weight
from braid.algorithms.distillation import bounded_ratio, divergence, over_top_k
from braid.algorithms.kl import clamped, kl_estimate
from braid.algorithms.recipes import Recipe
from braid.algorithms.segments import Segments, first_positions, segments
from braid.algorithms.surrogate import Tokens
from braid.algorithms.value_loss import value_loss
from braid.checks.sampler import token_sums
from braid.config.sft import DistillationConfig
from braid.models.base import Output
from braid.models.batch import PackedBatch
from braid.types import TiledDivergence

from .backend import Diagnostics, Loss


def policy_loss(
    recipe: Recipe, *, kl_coef: float | None = None, version: int = 1, is_checked: bool = False
) -> Loss:
    """The policy loss of a recipe:

        policy_loss_coef * (corrections * surrogate + kl_coef * KL)
            - entropy_coef * entropy + supervised_coef * cross-entropy of successes

    The KL term is in the loss only with kl_in: loss. `kl_coef` overrides the recipe's, since it may change
    from round to round. Fields read: `advantages`; `old_logprobs` (default: interpolated from
    `policy_versions`, where `version` is being trained; without these the current log-probs, detached);
    `ref_logprobs`, required for KL in the loss unless it is full (the model's output `Recipe.divergence`) or,
    with kl_top_k, computed from `top_tokens` and `top_logprobs` of the reference;
    `kl_weights`, factors of the KL in the loss (default: 1);
    `behavior_logprobs`, required for corrections and for the metrics of the mismatch between engine and
    trainer (measured at the old log-probs, so 0 if those are the engine's); and the fields of step_fields.py
    that the recipe needs.

    With logprob_level action or chunk, the surrogate is that of decisions: of the sum of a decision's
    log-probs. It is divided among the decision's tokens, so the weights of rows must count decisions; so it
    is with turn_weighting: turns, where each token has its own surrogate. KL, corrections and metrics stay
    those of tokens. entropy_level is the same for the entropy bonus: the entropy of a token is then that of
    its decision, the sum.

    A sequence is a trajectory, whatever rows it was cut into; losses that compare sequences need the rows of
    a trajectory in one micro-batch.

    The step is dropped if the mean ratio over all of its tokens exceeds early_stop_ratio. RLinf instead
    multiplies the loss of each micro-batch with too large a ratio by 0, and takes the step with the rest.
    """
    limits = {} if recipe.early_stop_ratio is None else {"policy/ratio_mean": recipe.early_stop_ratio}
    coef = recipe.kl_coef if kl_coef is None else kl_coef
    outputs: list[Output] = [
        "logprobs",
        "entropy",
        *((recipe.divergence,) if recipe.full_kl_in == "loss" else ()),
        *(("logprobs_of_top",) if recipe.compares_distributions and recipe.kl_top_k else ()),
    ]
    compute = partial(_policy_loss, recipe, coef, version, is_checked)
    whole = _reads_sequences(recipe)
    return Loss(frozenset(outputs), compute, limits, whole_trajectories=whole, is_checked=is_checked)


def _reads_sequences(recipe: Recipe) -> bool:
    """Whether a ratio, or a correction, is one of whole sequences."""
    is_of_sequences = (
        c.level in ("sequence", "geometric") or c.mode == "mask_sequence" for c in recipe.corrections
    )
    return recipe.policy_loss.reads_sequences or any(is_of_sequences)


def value_loss_of(recipe: Recipe) -> Loss:
    """value_loss_coef * value loss, at the positions that the policy wrote; if values are those of turns or
    actions, at the first position of each, so the weights of rows must count these. Reads the fields `values`
    (of the critic before the update) and `returns`. Clip bounds are in units of the critic's deviation
    (ValueHead.deviation)."""
    return Loss(frozenset({"values", "value_deviation"}), partial(_value_loss, recipe))


def with_value_loss(loss: Loss, recipe: Recipe) -> Loss:
    """The sum of a policy's `loss` and the value loss, for a policy with a value head. Weights are those of
    `policy_loss`. Where the two count different units, those of the value loss weigh as much as their tokens
    do in the policy's."""

    def compute(outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
        of_policy, diagnostics = loss.compute(outputs, batch)
        weights = batch.weights
        assert weights is not None, "training batches need weights"
        if recipe.counts_decisions:
            weights = weights / _decisions(batch).size.float()
        if recipe.value_level == "turn":
            weights = weights * _decisions(batch).size.float()
        elif recipe.value_level == "action":
            weights = weights * batch.action_size
        of_critic, more = _value_loss(recipe, outputs, replace(batch, weights=weights))
        count = aggregate(torch.ones_like(weights), _valued(recipe, batch).mask, weights)
        means = {"critic/loss": (of_critic.detach().double(), count)}
        return of_policy + of_critic, replace(diagnostics, means=diagnostics.means | more.means | means)

    return replace(loss, outputs=loss.outputs | value_loss_of(recipe).outputs, compute=compute)


def supervised_loss(distillation: DistillationConfig | None = None) -> Loss:
    """Of the tokens at which the mask is True, with w the `weight` of `distillation` (0 without it):

        (1 - w) * cross-entropy + w * divergence from the teacher

    The divergence is over the whole vocabulary, which the model computes, or with top_k over `top_tokens`,
    of which the field `top_logprobs` has the teacher's log-probs."""
    outputs: list[Output] = ["logprobs"]
    if distillation is not None:
        whole = cast("TiledDivergence", distillation.divergence)
        outputs.append(whole if distillation.top_k is None else "logprobs_of_top")
    return Loss(frozenset(outputs), partial(_supervised_loss, distillation))


def _policy_loss(
    recipe: Recipe,
    kl_coef: float,
    version: int,
    is_checked: bool,
    outputs: dict[str, Tensor],
    batch: PackedBatch,
) -> tuple[Tensor, Diagnostics]:
    logprobs, entropy, fields = outputs["logprobs"], outputs["entropy"], batch.fields
    old = fields.get("old_logprobs", logprobs.detach())
    if "policy_versions" in fields:
        old = proximal_logprobs(
            logprobs, fields["behavior_logprobs"], fields["policy_versions"], version=version
        )
    decisions = _segments(batch, recipe.logprob_level)
    denominator = fields["behavior_logprobs"] if recipe.policy_loss.compares_sampler else old
    parts = (logprobs, denominator)
    acted, acted_old = parts if decisions is None else map(decisions.sum, parts)
    ratio = recipe.policy_loss.ratio(acted, acted_old, partial(_segments, batch))
    is_chosen = fields["is_chosen"] if recipe.policy_loss.selects_tokens else torch.zeros_like(old)
    sequences = segments(batch.mask, batch.trajectory) if recipe.policy_loss.reads_sequences else None
    tokens = Tokens(acted, acted_old, fields["advantages"], ratio, is_chosen, sequences)
    per_token, means = recipe.policy_loss.per_token(tokens)
    maxima = {"ratio_max": ratio.detach()}
    means = means | {
        "entropy": entropy.detach(),
        "ratio_mean": ratio.detach(),
        "approx_kl": kl_estimate(old, logprobs.detach(), estimator="k3", clamp=None),
    }
    if recipe.corrections:
        factor, of_corrections = _corrections(recipe, old, batch)
        per_token = factor * per_token
        means |= of_corrections
    if (kl := _kl(recipe, outputs, fields)) is not None:
        means["kl"] = kl.detach()
        if recipe.kl_in == "loss":
            if recipe.kl_ratio_clip is not None:
                kl = kl * bounded_ratio(logprobs, old, recipe.kl_ratio_clip)
            if "kl_weights" in fields:
                kl = kl * fields["kl_weights"]
            per_token = per_token + kl_coef * kl
    else:
        assert kl_coef == 0 or recipe.kl_in != "loss", "KL in the loss needs ref_logprobs"
    per_token = recipe.policy_loss_coef * per_token
    if recipe.entropy_coef:
        over = _segments(batch, recipe.entropy_level)
        per_token = per_token - recipe.entropy_coef * (entropy if over is None else over.sum(entropy))
    if "behavior_logprobs" in fields:
        behavior = fields["behavior_logprobs"]
        means["logprob_mismatch_kl"] = kl_estimate(behavior, old, estimator="k3", clamp=None)
        maxima["logprob_mismatch_max"] = (old - behavior).abs()
    share = torch.ones_like(old)
    if recipe.counts_decisions:
        size = _decisions(batch).size.float()
        per_token, share = per_token / size, share / size
    loss, diagnostics = _reduced(per_token, batch), _diagnostics("policy", batch.mask, means, maxima)
    diagnostics = replace(diagnostics, weight=_reduced(share, batch))
    if is_checked:
        assert batch.decision is not None, "batches of rows carry the index of decisions"
        sums = token_sums(logprobs, entropy, fields, batch.decision, batch.trajectory, recipe.kl_clamp)
        diagnostics = replace(diagnostics, checks=sums)
    if recipe.supervised_coef:
        weights = fields["supervised_weights"]
        loss = loss + recipe.supervised_coef * aggregate(-logprobs, batch.mask, weights)
        successes = _diagnostics("policy", weights > 0, {"supervised_loss": -logprobs.detach()})
        diagnostics.means.update(successes.means)
    return loss, diagnostics


def _kl(recipe: Recipe, outputs: dict[str, Tensor], fields: dict[str, Tensor]) -> Tensor | None:
    if recipe.full_kl_in == "loss":
        return clamped(outputs[recipe.divergence], recipe.kl_clamp)
    if "top_logprobs" in fields:
        both = over_top_k(outputs["logprobs_of_top"], fields["top_logprobs"], recipe.kl_rest)
        kl = divergence(*both, kind=recipe.divergence, weight=recipe.kl_mixture)
        return clamped(kl, recipe.kl_clamp)
    if "ref_logprobs" not in fields:
        return None
    ref, estimator = fields["ref_logprobs"], recipe.kl_estimator
    return kl_estimate(outputs["logprobs"], ref, estimator=estimator, clamp=recipe.kl_clamp)


def _segments(batch: PackedBatch, level: str) -> Segments | None:
    """Segments over which a log-prob, ratio or weight of the level is computed; None for single tokens."""
    if level == "token":
        return None
    if level.startswith(("turn", "action", "chunk")):
        return _decisions(batch)
    return segments(batch.mask, batch.trajectory)


def _decisions(batch: PackedBatch) -> Segments:
    assert batch.decision is not None, "batches of rows carry the index of decisions"
    return segments(batch.mask, batch.decision)


def _corrections(recipe: Recipe, old: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Product of the factors of all corrections, and their metrics."""
    assert "behavior_logprobs" in batch.fields, "corrections need behavior_logprobs"
    behavior = batch.fields["behavior_logprobs"]
    product = torch.ones_like(old)
    sequences = segments(batch.mask, batch.trajectory)
    is_truncated, kept = torch.zeros_like(batch.mask), batch.mask
    for correction in recipe.corrections:
        over = _segments(batch, correction.level)
        if over is not None and correction.tokens == "kept":
            over = over.within(kept)
        weight = sampling_weight(old, behavior, over, level=correction.level, measure=correction.measure)
        factor, is_outside = correction_factor(
            weight,
            mode=correction.mode,
            low=correction.low,
            high=correction.high,
            sequences=sequences,
        )
        product = product * factor
        if correction.mode == "truncate":
            is_truncated |= is_outside
        else:
            kept = kept & ~is_outside
    return product, {
        "correction_mean": product,
        "correction_truncated_fraction": is_truncated.to(product.dtype),
        "correction_masked_fraction": (~kept).to(product.dtype),
    }


def _value_loss(recipe: Recipe, outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
    values, old, returns = outputs["values"], batch.fields["values"], batch.fields["returns"]
    deviation = outputs["value_deviation"]
    per_token = recipe.value_loss_coef * value_loss(
        values, old, returns, clip=recipe.value_clip, huber_delta=recipe.huber_delta, deviation=deviation
    )
    means = {"value_mean": values.detach(), "return_mean": returns}
    if recipe.value_clip is not None:
        means["clip_fraction"] = ((values.detach() - old).abs() > recipe.value_clip * deviation).float()
    batch = _valued(recipe, batch)
    diagnostics = replace(
        _diagnostics("critic", batch.mask, means), weight=_reduced(torch.ones_like(values), batch)
    )
    return _reduced(per_token, batch), diagnostics


def _supervised_loss(
    distillation: DistillationConfig | None, outputs: dict[str, Tensor], batch: PackedBatch
) -> tuple[Tensor, Diagnostics]:
    logprobs = outputs["logprobs"]
    per_token = -logprobs
    means = {"token_probability": logprobs.detach().clamp(max=0).exp()}  # densities may exceed 1
    if distillation is not None:
        kind, weight = distillation.divergence, distillation.weight
        if distillation.top_k is None:
            distance = outputs[kind]
        else:
            both = over_top_k(outputs["logprobs_of_top"], batch.fields["top_logprobs"], distillation.rest)
            distance = divergence(*both, kind=kind, weight=distillation.mixture)
        per_token = (1.0 - weight) * per_token + weight * distance
        means["divergence"] = distance.detach()
    return _reduced(per_token, batch), _diagnostics("sft", batch.mask, means)


def _valued(recipe: Recipe, batch: PackedBatch) -> PackedBatch:
    """With a mask of the positions that have a value."""
    if recipe.value_level == "token":
        return batch
    if recipe.value_level == "action":
        return batch.with_mask(batch.mask & (batch.unit % batch.action_size == 0))
    assert batch.decision is not None, "batches of rows carry the index of decisions"
    return batch.with_mask(first_positions(batch.decision))


def _reduced(per_token: Tensor, batch: PackedBatch) -> Tensor:
    assert batch.weights is not None, "training batches need weights"
    return aggregate(per_token, batch.mask, batch.weights)


def _diagnostics(
    role: str, mask: Tensor, means: dict[str, Tensor], maxima: dict[str, Tensor] | None = None
) -> Diagnostics:
    """Means and maxima over the masked positions. Sums are float64, so that the order of positions does not
    matter."""
    count = mask.sum()
    return Diagnostics(
        {f"{role}/{name}": (x.where(mask, 0).sum(dtype=torch.float64), count) for name, x in means.items()},
        {f"{role}/{name}": x.where(mask, -torch.inf).amax() for name, x in (maxima or {}).items()},
    )
