"""Advantage computation: from the rewards and values of a round's rows to advantages and returns.

Owns the order of the stages. The advantages are in algorithms/advantages. Rewards, baselines and statistics
are of trajectories, whose rows follow each other in the order of its segments; returns run over all of them.
If agents have rewards of their own, the rows of each agent (Row.player) are a trajectory here, and compared
with those of the same agent.

    center and scale rewards       reward_mean, reward_std (per trajectory sum)
    clip rewards                   reward_clip (per trajectory sum)
    subtract kl_coef * KL          kl_in: reward
    clip rewards                   token_reward_clip (per position)
    whiten rewards                 whiten_rewards
    compute advantages             advantage
    subtract kl_coef * KL          kl_in: advantage
    whiten and clip advantages     whiten_advantages, advantage_clip

Statistics are taken over all rows of the round in float64, so they do not depend on the split into steps.
Trajectories that mask_truncated or mask_long_failures exclude from the loss count in these statistics, except
in whiten_advantages, which covers only the trained rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from braid.algorithms.advantages.round import Round, flat, groups_of, totals_of, trajectories_of, write_field
from braid.algorithms.advantages.whitening import whiten
from braid.algorithms.kl import clamped, kl_estimate
from braid.algorithms.recipes import Recipe
from braid.algorithms.rewards import RunningMoments, reward_statistics
from braid.checks.advantages import advantage_sums
from braid.checks.reference import kl_sums
from braid.types import Row, is_at_least


def compute_advantages(
    rows: Sequence[Row],
    recipe: Recipe,
    *,
    kl_coef: float | None = None,
    running: RunningMoments | None = None,
    sums: dict[str, float] | None = None,
) -> dict[str, float]:
    """Write `advantages` (and `returns`, if values are learned) into each row, from the rewards and values of
    its trajectory. `rewards` are replaced by the processed rewards that the advantages are computed from,
    then in float32.

    `kl_coef` overrides the recipe's, since it may change from round to round. `running` holds the moments of
    all earlier rounds for statistics of kind "running", and is updated with this one. `sums` receives what
    the checks of the loop read. Returns metrics by name: mean KL per position, and the explained variance of
    the critic's values.
    """
    metrics: dict[str, float] = {}
    _normalize(rows, recipe, RunningMoments() if running is None else running)
    penalties: list[np.ndarray] = []
    if recipe.has_kl_before_update:
        kl = [np.where(row.mask, _kl(row, recipe), np.float32(0.0)) for row in rows]
        metrics["reward/kl"] = sum(float(values.sum()) for values in kl) / max(
            sum(row.num_tokens for row in rows), 1
        )
        if sums is not None and not recipe.full_kl_in:
            sums |= kl_sums(rows, kl, recipe)
        coef = np.float32(recipe.kl_coef if kl_coef is None else kl_coef)
        weights = [row.fields.get("kl_weights", np.float32(1.0)) for row in rows]
        penalties = [coef * weight * values for weight, values in zip(weights, kl, strict=True)]
    if penalties and recipe.kl_in == "reward":
        for row, penalty in zip(rows, penalties, strict=True):
            row.fields["rewards"] = row.fields["rewards"] - penalty
    if (bound := recipe.token_reward_clip) is not None:
        for row in rows:
            row.fields["rewards"] = row.fields["rewards"].clip(-bound, bound)
    if recipe.whiten_rewards:
        mask = flat([row.mask for row in rows])
        write_field(rows, "rewards", whiten(flat([row.fields["rewards"] for row in rows]), mask))
    round_ = Round.of(rows)
    advantages = recipe.advantage.compute(round_)
    if sums is not None:
        sums |= advantage_sums(round_, advantages, recipe)
    write_field(rows, "rewards", round_.rewards)
    if penalties and recipe.kl_in == "advantage":
        advantages = advantages - flat(penalties)
    if recipe.whiten_advantages:
        is_trained = np.repeat(are_trained(rows, recipe), [len(row) for row in rows])
        advantages = whiten(advantages, round_.mask & torch.from_numpy(is_trained))
    if recipe.advantage_clip is not None:
        advantages = advantages.clamp(-recipe.advantage_clip, recipe.advantage_clip)
    write_field(rows, "advantages", advantages)
    return metrics | recipe.advantage.report(round_)


class Cut(Protocol):
    """A row or its metadata."""

    @property
    def trajectory(self) -> int: ...
    @property
    def is_truncated(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def score(self) -> float: ...


def are_trained(rows: Sequence[Cut], recipe: Recipe) -> list[bool]:
    """Whether each row contributes to the loss.

    mask_truncated excludes truncated trajectories from numerator and denominator; mask_long_failures excludes
    those of at least that many tokens with a score of 0 or less. Their rewards still count in the statistics
    of their group.
    """
    num_tokens: Counter[int] = Counter()
    for row in rows:
        num_tokens[row.trajectory] += row.num_tokens
    limit = recipe.mask_long_failures

    def is_trained(row: Cut) -> bool:
        is_long_failure = (
            limit is not None and is_at_least(0.0, row.score) and num_tokens[row.trajectory] >= limit
        )
        return not (is_long_failure or (recipe.mask_truncated and row.is_truncated))

    return [is_trained(row) for row in rows]


def _end(row: Row) -> int:
    """The policy's last position."""
    return int(np.flatnonzero(row.mask)[-1])


def _normalize(rows: Sequence[Row], recipe: Recipe, running: RunningMoments) -> None:
    """Center, scale and clip rewards in place.

    Every reward of a trajectory is divided by its scale, and the center is subtracted at the policy's last
    position: a single final reward becomes (r - center) / scale, and with gamma = 1 the returns of all
    positions shift equally. Clipping the sum of a trajectory's rewards to reward_clip also adjusts the reward
    at that position.
    """
    trajectories = trajectories_of(rows)
    if recipe.reward_mean != "none" or recipe.reward_std != "none":
        _standardize(trajectories, recipe, running)
    if (bound := recipe.reward_clip) is not None:
        totals = totals_of(trajectories)
        for segments, excess in zip(
            trajectories, (totals - totals.clamp(-bound, bound)).tolist(), strict=True
        ):
            segments[-1].fields["rewards"][_end(segments[-1])] -= excess
            for row in segments:
                if row.baseline is not None:
                    row.baseline = min(max(row.baseline, -bound), bound)


def _standardize(trajectories: Sequence[Sequence[Row]], recipe: Recipe, running: RunningMoments) -> None:
    totals = totals_of(trajectories)
    if "running" in (recipe.reward_mean, recipe.reward_std):
        running.update(totals)
    center, scale = reward_statistics(
        totals,
        groups_of(trajectories),
        mean=recipe.reward_mean,
        std=recipe.reward_std,
        running=running,
        sources=_sources(trajectories),
    )
    for segments, offset, divisor in zip(trajectories, center.tolist(), scale.tolist(), strict=True):
        for row in segments:
            rewards = row.fields["rewards"].astype(np.float64)
            if row is segments[-1]:
                rewards[_end(row)] -= offset
            row.fields["rewards"] = rewards / divisor
            if row.baseline is not None:
                row.baseline = (row.baseline - offset) / divisor


def _kl(row: Row, recipe: Recipe) -> np.ndarray:
    """KL of the policy before the update from the reference, per position."""
    if recipe.full_kl_in:
        return clamped(torch.from_numpy(row.fields["kl"]), recipe.kl_clamp).numpy()
    old, ref = (torch.from_numpy(row.fields[name]) for name in ("old_logprobs", "ref_logprobs"))
    return kl_estimate(old, ref, estimator=recipe.kl_estimator, clamp=recipe.kl_clamp).numpy()


def _sources(trajectories: Sequence[Sequence[Row]]) -> Tensor:
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(first.source, len(numbers)) for first, *_ in trajectories])
