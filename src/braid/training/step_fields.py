"""Row fields that depend on all rows of an optimizer step.

A loss that sees one micro-batch cannot compute them. They are written before the step's first forward pass,
over all of its rows, so that they depend neither on the micro-batches nor on the order of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from braid.algorithms.aggregate import row_weights
from braid.algorithms.covariance import covariances
from braid.algorithms.recipes import Recipe
from braid.types import Row


def write_step_fields(
    rows: Sequence[Row], recipe: Recipe, *, constant: float | None, key: tuple[int, ...]
) -> None:
    """Write the fields that the recipe needs into the rows of a step, replacing those of an earlier step.

    `is_chosen` (of a policy loss that selects tokens): 1 at the selected tokens, else 0, from `advantages`
    and `old_logprobs`. The random numbers are seeded by `key` and each trajectory.

    `supervised_weights` (supervised_coef > 0): weight of each position in the supervised term, from
    `is_success`. The term is aggregated as the recipe says (`constant` for token_sum_constant), over
    successful rows only: with token_mean it is the mean cross-entropy of their tokens, however few they are.
    All zeros if no row is successful.
    """
    if recipe.policy_loss.selects_tokens:
        _write_choice(rows, recipe, key)
    if recipe.supervised_coef > 0:
        _write_supervised_weights(rows, recipe, constant)


def _write_choice(rows: Sequence[Row], recipe: Recipe, key: tuple[int, ...]) -> None:
    def flat(arrays: Sequence[NDArray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays))

    advantages = flat([row.fields["advantages"][row.mask] for row in rows])
    logprobs = flat([row.fields["old_logprobs"][row.mask] for row in rows])
    random = {n: np.random.default_rng((*key, n)) for n in {row.trajectory for row in rows}}
    priorities = flat([random[row.trajectory].random(row.num_tokens) for row in rows])
    is_chosen = recipe.policy_loss.select(covariances(advantages, logprobs), priorities)
    for row, part in zip(rows, is_chosen.split([row.num_tokens for row in rows]), strict=True):
        row.fields["is_chosen"] = np.zeros(len(row), np.float32)
        row.fields["is_chosen"][row.mask] = part.numpy()


def _write_supervised_weights(rows: Sequence[Row], recipe: Recipe, constant: float | None) -> None:
    imitated = [row.mask & (row.fields["is_success"] > 0) for row in rows]
    counts, groups = [int(mask.sum()) for mask in imitated], [row.group for row in rows]
    agents = [(row.trajectory, row.agent) for row in rows]
    weights = row_weights(counts, groups, mode=recipe.aggregation, constant=constant, agents=agents)
    for row, mask, weight in zip(rows, imitated, weights, strict=True):
        row.fields["supervised_weights"] = mask * np.float32(weight)
