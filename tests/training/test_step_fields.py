"""Fields that depend on the rows of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from braid.algorithms.policy_losses.clip_cov import ClipCov
from braid.algorithms.policy_losses.kl_cov import KlCov
from braid.algorithms.recipes import RECIPES
from braid.training.step_fields import write_step_fields
from braid.types import Row

GRPO = RECIPES["grpo"]
CLIP_COV = replace(RECIPES["clip_cov"], policy_loss=ClipCov(cov_fraction=0.1, cov_low=0.0, cov_high=5.0))
KL_COV = replace(RECIPES["kl_cov"], policy_loss=KlCov(cov_fraction=0.1))
NUM_ROWS, LENGTH = 10, 12


def _rows() -> list[Row]:
    """Ten rows of two context positions and ten that the policy wrote: a hundred tokens."""
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH) >= 2
    rows = []
    for number in range(NUM_ROWS):
        fields = {
            "advantages": np.where(mask, rng.normal(), 0).astype(np.float32),
            "old_logprobs": np.where(mask, -3 * rng.random(LENGTH), 0).astype(np.float32),
            "is_success": np.full(LENGTH, number % 5 == 0, np.float32),
        }
        rows.append(Row({}, mask, group=number // 5, trajectory=number, fields=fields))
    return rows


def _chosen(rows: list[Row], recipe=CLIP_COV, key=(0, 1)) -> np.ndarray:
    """[rows by trajectory, position]."""
    write_step_fields(rows, recipe, constant=None, key=key)
    return np.stack([row.fields["is_chosen"] for row in sorted(rows, key=lambda row: row.trajectory)])


@pytest.mark.parametrize("recipe", [CLIP_COV, KL_COV])
def test_the_share_is_of_the_steps_tokens_and_context_is_never_chosen(recipe) -> None:
    chosen = _chosen(_rows(), recipe)
    assert chosen.sum() == 10
    assert not chosen[:, :2].any()


@pytest.mark.parametrize("recipe", [CLIP_COV, KL_COV])
def test_the_choice_does_not_depend_on_the_order_of_rows(recipe) -> None:
    rows = _rows()
    shuffled = [_rows()[i] for i in np.random.default_rng(1).permutation(NUM_ROWS)]
    assert (_chosen(rows, recipe) == _chosen(shuffled, recipe)).all()


def test_kl_cov_takes_the_greatest_covariances() -> None:
    rows = _rows()
    chosen = _chosen(rows, KL_COV)[:, 2:] > 0
    advantages = np.stack([row.fields["advantages"][2:] for row in rows])
    logprobs = np.stack([row.fields["old_logprobs"][2:] for row in rows])
    together = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    assert together[chosen].min() > together[~chosen].max()


def test_clip_cov_draws_anew_at_each_step_and_the_same_for_one_key() -> None:
    first, again, next_ = (_chosen(_rows(), CLIP_COV, key=(0, step)) for step in (1, 1, 2))
    assert (first == again).all()
    assert (first != next_).any()


def test_the_choice_of_a_step_replaces_that_of_the_step_before() -> None:
    rows = _rows()
    _chosen(rows, CLIP_COV, key=(0, 1))
    assert (_chosen(rows, CLIP_COV, key=(0, 2)) == _chosen(_rows(), CLIP_COV, key=(0, 2))).all()


def test_supervised_weights_average_over_the_successful_rows_alone() -> None:
    rows = _rows()
    write_step_fields(rows, replace(GRPO, supervised_coef=1.0), constant=None, key=(0, 0))
    weights = np.stack([row.fields["supervised_weights"] for row in rows])
    # two rows of ten tokens succeed
    assert weights[0].tolist() == pytest.approx([0.0] * 2 + [1 / 20] * 10)
    assert weights.sum() == pytest.approx(1.0)
    assert not weights[[1, 2, 3, 4, 6, 7, 8, 9]].any()


def test_without_a_success_there_is_no_supervised_term() -> None:
    rows = _rows()
    for row in rows:
        row.fields["is_success"][:] = 0
    write_step_fields(rows, replace(GRPO, supervised_coef=1.0), constant=None, key=(0, 0))
    assert not any(row.fields["supervised_weights"].any() for row in rows)


def test_a_recipe_without_such_parts_writes_nothing() -> None:
    rows = _rows()
    names = rows[0].fields.keys()
    write_step_fields(rows, GRPO, constant=None, key=(0, 0))
    assert rows[0].fields.keys() == names
