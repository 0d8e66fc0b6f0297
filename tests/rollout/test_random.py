"""Counter-based uniforms: pure, uniform, and independent in every component of their keys."""

from __future__ import annotations

import numpy as np
import pytest

from braid.rollout.random import absorb, stream, uniforms, unit_interval

CHI_SQUARE_255_1E6 = 370.0
"""A chi-square variable of 255 degrees of freedom exceeds 370 with probability below 1e-5; the keys here are
fixed."""


def grid(*sizes: int) -> np.ndarray:
    """All keys of a box, one per row."""
    return np.stack([a.ravel() for a in np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij")], axis=1)


def chi_square(values: np.ndarray, cells: int) -> float:
    counts = np.bincount((values * cells).astype(int), minlength=cells)
    expected = len(values) / cells
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_same_key_gives_the_same_number_alone_or_among_others() -> None:
    keys = grid(5, 7, 11)
    together = uniforms(keys)
    shuffled = np.random.default_rng(0).permutation(len(keys))
    assert np.array_equal(uniforms(keys[shuffled]), together[shuffled])
    assert all(uniforms(keys[i : i + 1])[0] == together[i] for i in range(0, len(keys), 37))


def test_a_stream_continues_as_the_longer_key() -> None:
    key = (3, 0, 12345678901234, 7)
    positions = np.arange(100)
    continued = unit_interval(absorb(np.full(100, stream(key)), positions))
    assert np.array_equal(continued, uniforms([(*key, int(p)) for p in positions]))


def test_values_are_fixed_for_ever() -> None:
    assert uniforms([(0,), (1,)]).tolist() == [0.07334753904880631, 0.6896293517083649]


@pytest.mark.parametrize("shape", [(1, 1 << 18), (1 << 18, 1), (512, 512), (64, 64, 64)])
def test_numbers_are_uniform_over_any_box_of_keys(shape: tuple[int, ...]) -> None:
    values = uniforms(grid(*shape))
    assert values.min() >= 0
    assert values.max() < 1
    assert chi_square(values, 256) < CHI_SQUARE_255_1E6
    low_bits = (values * 2**53).astype(np.uint64) % np.uint64(256)
    assert chi_square(low_bits / 256, 256) < CHI_SQUARE_255_1E6


@pytest.mark.parametrize("column", [0, 1, 2])
def test_neighbours_along_any_component_are_independent(column: int) -> None:
    keys = grid(64, 64, 64)
    here = uniforms(keys)
    keys[:, column] += 1
    there = uniforms(keys)
    pair = np.floor(here * 16) * 16 + np.floor(there * 16)
    assert chi_square((pair + 0.5) / 256, 256) < CHI_SQUARE_255_1E6
    assert abs(np.corrcoef(here, there)[0, 1]) < 5 / np.sqrt(len(keys)), "five standard errors"


def test_negative_and_huge_components_and_their_order_matter() -> None:
    keys = [(-1, 5), (5, -1), (2**63 - 1, 5), (0, 5), (5, 0)]
    assert len(set(uniforms(keys).tolist())) == len(keys)


def test_keys_of_unequal_length_differ() -> None:
    assert uniforms([(0,)])[0] != uniforms([(0, 0)])[0] != uniforms([(0, 0, 0)])[0]
