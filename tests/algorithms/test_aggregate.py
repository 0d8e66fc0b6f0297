"""Reductions do not depend on micro-batching, order or padding."""

import itertools
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.algorithms.aggregate import aggregate, row_weights
from braid.types import Aggregation

MODES = get_args(Aggregation)
CLOSE = {"atol": 1e-12, "rtol": 1e-12}  # float64; only the order of a sum differs


@dataclass(frozen=True)
class Step:
    """Rows of (losses, mask) and their prompts."""

    rows: list[tuple[list[float], list[bool]]]
    prompts: list[int]

    def weights(self, mode: Aggregation) -> list[float]:
        counts = [sum(mask) for _, mask in self.rows]
        return row_weights(counts, self.prompts, mode=mode, constant=16.0)


def _share(rows, weights):
    """The loss of a micro-batch of rows, by packing them."""
    values = torch.tensor([x for losses, _ in rows for x in losses], dtype=torch.float64)
    mask = torch.tensor([m for _, masks in rows for m in masks], dtype=torch.bool)
    spread = torch.tensor(
        [w for (losses, _), w in zip(rows, weights, strict=True) for _ in losses], dtype=torch.float64
    )
    return aggregate(values, mask, spread)


@st.composite
def steps(draw):
    losses = st.floats(-10, 10, allow_subnormal=False)
    row = st.lists(st.tuples(losses, st.booleans()), max_size=6)
    rows = [
        ([x for x, _ in pairs], [m for _, m in pairs])
        for pairs in draw(st.lists(row, min_size=1, max_size=8))
    ]
    return Step(rows, draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))))


def _assert_close(mine, other, mode):
    torch.testing.assert_close(mine, other, **CLOSE, msg=lambda m: f"{mode}: {m}")


@given(step=steps(), cuts=st.lists(st.integers(0, 8), max_size=4))
def test_the_shares_of_micro_batches_add_up_to_the_loss_however_cut(step, cuts):
    bounds = sorted({0, len(step.rows), *(min(cut, len(step.rows)) for cut in cuts)})
    for mode in MODES:
        weights = step.weights(mode)
        shares = [_share(step.rows[a:b], weights[a:b]) for a, b in itertools.pairwise(bounds)]
        _assert_close(torch.stack(shares).sum(), _share(step.rows, weights), mode)


@pytest.mark.slow
@given(step=steps(), data=st.data())
def test_the_loss_does_not_depend_on_row_order(step, data):
    order = data.draw(st.permutations(range(len(step.rows))))
    moved = Step([step.rows[i] for i in order], [step.prompts[i] for i in order])
    for mode in MODES:
        _assert_close(_share(moved.rows, moved.weights(mode)), _share(step.rows, step.weights(mode)), mode)


@pytest.mark.slow
@given(step=steps(), prompt=st.integers(0, 9))
def test_rows_without_tokens_change_nothing(step, prompt):
    filled = Step([*step.rows, ([5.0, 5.0], [False, False])], [*step.prompts, prompt])
    for mode in MODES:
        assert filled.weights(mode) == [*step.weights(mode), 0.0], mode
        _assert_close(_share(filled.rows, filled.weights(mode)), _share(step.rows, step.weights(mode)), mode)


@given(step=steps())
def test_means_of_a_constant_are_that_constant(step):
    rows = [([3.0] * len(mask), mask) for _, mask in step.rows]
    expected = 3.0 if any(any(mask) for _, mask in rows) else 0.0
    for mode in ("token_mean", "sequence_mean_token_mean", "prompt_mean"):
        _assert_close(_share(rows, step.weights(mode)), torch.tensor(expected).double(), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_tokens_has_no_weight(mode):
    assert row_weights([0, 0], [0, 1], mode=mode, constant=16.0) == [0.0, 0.0]


def test_masked_values_reach_neither_loss_nor_gradient():
    values = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    loss = aggregate(values, torch.tensor([True, False, False]), torch.full((3,), 0.5))
    loss.backward()
    assert loss.item() == 0.5
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.0]


def test_counts_and_groups_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        row_weights([1, 2], [0], mode="token_mean", constant=None)
