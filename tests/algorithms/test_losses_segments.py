"""Segments of packed batches and the selection of tokens do not depend on other rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from braid.algorithms.covariance import choose_greatest, choose_within, covariances
from braid.algorithms.segments import Segments, segments

LEVELS = ("turn", "sequence")


@st.composite
def packed(draw: st.DrawFn) -> list[tuple[list[float], list[bool]]]:
    """Rows of (values, mask)."""
    cell = st.tuples(st.floats(-5, 5, width=32), st.booleans())
    rows = draw(st.lists(st.lists(cell, min_size=1, max_size=7), min_size=1, max_size=5))
    return [([v for v, _ in row], [m for _, m in row]) for row in rows]


def _flat(rows: list[tuple[list[float], list[bool]]]) -> tuple[Tensor, Tensor, Tensor]:
    values = torch.tensor([v for row, _ in rows for v in row], dtype=torch.float32)
    mask = torch.tensor([m for _, masks in rows for m in masks])
    index = torch.tensor([i for i, (row, _) in enumerate(rows) for _ in row])
    return values, mask, index


def _segments(mask: Tensor, row: Tensor, level: str) -> Segments:
    """Each run of masked positions of a row is a turn."""
    if level == "sequence":
        return segments(mask, row)
    begins = mask.clone()
    begins[1:] &= ~mask[:-1] | (row[1:] != row[:-1])
    return segments(mask, torch.where(mask, begins.cumsum(0) - 1, -1))


def _by_hand(values: list[float], mask: list[bool], level: str) -> list[tuple[float, float]]:
    """(sum, mean) at each masked position, computed from its row alone."""
    runs: list[list[int]] = []
    for place, is_in in enumerate(mask):
        if is_in:
            goes_on = runs and (level == "sequence" or runs[-1][-1] == place - 1)
            (runs[-1].append(place) if goes_on else runs.append([place]))
    out: list[tuple[float, float]] = []
    for run in runs:
        total = sum(values[i] for i in run)
        out += [(total, total / len(run))] * len(run)
    return out


@pytest.mark.parametrize("level", LEVELS)
@given(rows=packed())
def test_sums_and_means_are_those_of_each_row_alone(level, rows):
    values, mask, row = _flat(rows)
    over = _segments(mask, row, level)
    expected = [pair for row_values, row_mask in rows for pair in _by_hand(row_values, row_mask, level)]
    sums = torch.tensor([pair[0] for pair in expected], dtype=torch.float32)
    means = torch.tensor([pair[1] for pair in expected], dtype=torch.float32)
    # both are float64 sums of a few values below 5, rounded to float32
    torch.testing.assert_close(over.sum(values)[mask], sums, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(over.mean(values)[mask], means, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_masked_values_are_not_read(level):
    mask, row = torch.tensor([False, True, True, False, True]), torch.tensor([0, 0, 0, 1, 1])
    over = _segments(mask, row, level)
    values = torch.tensor([torch.nan, 1.0, 2.0, torch.inf, 5.0])
    assert over.sum(values)[mask].tolist() == [3.0, 3.0, 5.0]
    assert over.mean(values)[mask].tolist() == [1.5, 1.5, 5.0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_without_any_token_has_no_segments_and_no_error(level):
    over = _segments(torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1]), level)
    assert over.sum(torch.ones(3)).tolist() == [0.0, 0.0, 0.0]
    assert over.mean(torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


TOKENS = st.lists(
    st.tuples(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 3.0]), st.floats(-9, 0, width=32)),
    min_size=1,
    max_size=30,
)


@given(tokens=TOKENS, fraction=st.floats(0, 1), data=st.data())
def test_the_choice_does_not_depend_on_the_order_of_tokens(tokens, fraction, data):
    priorities = torch.rand(len(tokens), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    advantages, logprobs = torch.tensor(tokens).unbind(1)
    order = torch.tensor(data.draw(st.permutations(range(len(tokens)))))
    # Rounded, so that covariances that are equal but for the order of a sum in float64 are equal here too.
    together = covariances(advantages, logprobs).round(decimals=9)
    moved = covariances(advantages[order], logprobs[order]).round(decimals=9)
    for choose, bounds in ((choose_greatest, {}), (choose_within, {"low": 0.5, "high": 4.0})):
        chosen = choose(together, priorities, fraction=fraction, **bounds)
        assert torch.equal(choose(moved, priorities[order], fraction=fraction, **bounds), chosen[order])
        assert chosen.sum() <= max(1, int(fraction * len(tokens)))


def test_covariances_do_not_shrink_with_the_number_of_tokens():
    advantages, logprobs = torch.tensor([2.0, -2.0]), torch.tensor([-0.5, -3.5])
    once, often = (
        covariances(advantages, logprobs),
        covariances(advantages.repeat(1000), logprobs.repeat(1000)),
    )
    torch.testing.assert_close(often[:2], once)
    assert once.tolist() == [3.0, 3.0]
