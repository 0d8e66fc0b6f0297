"""Compiled products against PyTorch's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.rounding import assert_near

from braid_kernels.calls import Calls
from braid_kernels.products import PackedProduct, fits_panels, weight_gradient


def test_a_compiled_gradient_has_the_same_bits_with_any_number_of_threads() -> None:
    grad, x = torch.randn(600, 400), torch.randn(600, 192)
    threads, gradients = torch.get_num_threads(), list[torch.Tensor]()
    try:
        for num in (1, 2, 5):
            torch.set_num_threads(num)
            gradients.append(weight_gradient(grad, x))
    finally:
        torch.set_num_threads(threads)
    assert_near(gradients[0].double(), grad.double().T @ x.double(), 2e-5)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert not fits_panels(100)


@pytest.mark.parametrize(("size", "depth"), [(64, 64), (100, 33), (1, 300), (192, 520)])
def test_a_products_rows_do_not_depend_on_the_batch_or_on_threads(size: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, depth, generator=generator) for n in (20, size))
    bias = torch.randn(size, generator=generator)
    parts = slice(0, size // 2), slice(size // 2, size)
    product = PackedProduct(*(SimpleNamespace(weight=weight[part], bias=bias[part]) for part in parts))
    whole = product(x, Calls(), "out")
    exact = x.double() @ weight.double().T + bias.double()
    assert_near(whole.double(), exact, 2e-6 * depth**0.5)
    wide = torch.full((20, depth + 3), torch.nan)
    wide[:, :depth] = x
    assert torch.equal(product(wide[:, :depth], Calls(), "out"), whole)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for num in range(1, 20):
            assert torch.equal(product(x[:num], Calls(), "out"), whole[:num])
    finally:
        torch.set_num_threads(threads)
