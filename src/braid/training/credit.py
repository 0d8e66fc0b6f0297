"""From rewards to advantages: what the rows of a round need before they can be trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from braid.algorithms.advantages import gae, group_advantages, whiten
from braid.algorithms.kl import kl_estimate
from braid.algorithms.recipes import Recipe
from braid.types import Row


def assign_credit(rows: Sequence[Row], recipe: Recipe) -> dict[str, float]:
    """Write `advantages` (and `returns` for gae) into each row, from its rewards and values.

    KL in the reward is taken off first: `rewards[t] -= kl_coef * kl(old, ref)[t]`. Returns plain facts about what was
    assigned, by metric name: mean KL per position, and how much of the returns' variance the critic's values explain.
    """
    facts: dict[str, float] = {}
    if recipe.kl_coef > 0 and recipe.kl_in == "reward":
        facts["reward/kl"] = _subtract_kl(rows, recipe)
    mask = _flat(rows, [row.mask for row in rows]).bool()
    if recipe.advantage == "gae":
        advantages = _gae(rows, mask, recipe)
        facts["critic/explained_variance"] = _explained_variance(rows)
    else:
        advantages = _grouped(rows, mask, recipe)
    if recipe.whiten_advantages:
        advantages = whiten(advantages, mask)
    _unflatten(rows, "advantages", advantages)
    return facts


def _subtract_kl(rows: Sequence[Row], recipe: Recipe) -> float:
    total, count = 0.0, 0
    for row in rows:
        kl = kl_estimate(
            torch.from_numpy(row.fields["old_logprobs"]),
            torch.from_numpy(row.fields["ref_logprobs"]),
            estimator=recipe.kl_estimator,
            clamp=recipe.kl_clamp,
        ).numpy()
        kl = np.where(row.mask, kl, np.float32(0.0))
        row.fields["rewards"] = row.fields["rewards"] - np.float32(recipe.kl_coef) * kl
        total, count = total + float(kl.sum()), count + row.num_tokens
    return total / max(count, 1)


def _grouped(rows: Sequence[Row], mask: Tensor, recipe: Recipe) -> Tensor:
    rewards = torch.tensor([float(row.fields["rewards"].sum()) for row in rows])
    groups = torch.tensor([row.group for row in rows])
    per_row = group_advantages(rewards, groups, normalize_by_std=recipe.normalize_by_std)
    lengths = torch.tensor([len(row) for row in rows])
    return torch.repeat_interleave(per_row, lengths) * mask


def _gae(rows: Sequence[Row], mask: Tensor, recipe: Recipe) -> Tensor:
    values = _flat(rows, [row.fields["values"] for row in rows])
    bootstrap = torch.tensor([0.0 if row.is_terminal else float(row.fields["values"][-1]) for row in rows])
    advantages, returns = gae(
        _flat(rows, [row.fields["rewards"] for row in rows]),
        values,
        mask,
        tuple(len(row) for row in rows),
        bootstrap,
        gamma=recipe.gamma,
        lam=recipe.gae_lambda,
    )
    _unflatten(rows, "returns", returns)
    return advantages


def _explained_variance(rows: Sequence[Row]) -> float:
    """1 - var(return - value) / var(return) over the positions that the policy wrote; nan when all returns are equal."""
    returns, values = (
        np.concatenate([row.fields[name][row.mask] for row in rows]).astype(np.float64)
        for name in ("returns", "values")
    )
    variance = returns.var()
    return float(1.0 - (returns - values).var() / variance) if variance > 0 else float("nan")


def _flat(rows: Sequence[Row], arrays: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)) if rows else torch.empty(0)


def _unflatten(rows: Sequence[Row], name: str, flat: Tensor) -> None:
    parts = torch.split(flat, [len(row) for row in rows])
    for row, part in zip(rows, parts, strict=True):
        row.fields[name] = part.to(torch.float32).numpy()
