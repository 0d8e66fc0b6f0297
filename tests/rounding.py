"""Bounds on the difference of two correct computations of one number.

A sum of n terms, in whatever order it is computed, is off by at most n * eps / 2 of the sum of their sizes
(Higham, Accuracy and Stability of Numerical Algorithms, 4.2), so two orders differ by at most n * eps.
Typical errors grow as the square root of n only, which leaves room for other instruction sets and libraries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rounding(num_terms: int, *, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """The bound for sums of `num_terms` whose sizes add up to `size`; for a chain of layers, of the terms of
    all their sums together."""
    return num_terms * torch.finfo(dtype).eps * size


def assert_as_accurate(ours: Tensor, plain: Tensor, exact: Tensor, what: str = "") -> None:
    """`ours` is at most twice as far from `exact` (float64) as `plain`, the module that it replaces, or four
    roundings of each number where `plain` happens to be closer. Distances are norms of whole tensors."""
    mine, other = (torch.linalg.vector_norm(t.double() - exact) for t in (ours, plain))
    least = rounding(4, size=float(torch.linalg.vector_norm(exact)), dtype=plain.dtype)
    assert mine <= max(2 * float(other), least), f"{what}: off by {mine:.1e}, the plain module by {other:.1e}"


def assert_near(ours: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Equal up to `tolerance` of the norm of the whole tensor: where terms cancel, the relative error of a
    single element can be larger."""
    error = torch.linalg.vector_norm(ours - expected) / torch.linalg.vector_norm(expected)
    assert error <= tolerance, f"{what}: relative error {error:.1e}"
