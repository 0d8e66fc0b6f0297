"""Linear layers by oneDNN give the products of PyTorch's default, forward and backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.rounding import assert_as_accurate
from torch import nn

from braid.models import linear as module
from braid.models.linear import Linear, linear, uses_onednn

needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of PyTorch lacks oneDNN"
)


@pytest.fixture
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where oneDNN is the faster library."""
    monkeypatch.setattr(module, "cpu_products", lambda: "onednn")


def layer(inputs: int, outputs: int, *, bias: bool = True) -> Linear:
    made = nn.Linear(inputs, outputs, bias=bias)
    made.__class__ = Linear
    return made  # pyright: ignore[reportReturnType]


@needs_onednn
@pytest.mark.usefixtures("_onednn")
@pytest.mark.parametrize(
    ("bias", "compiles", "size"), [(False, False, 160), (True, False, 160), (True, True, 192)]
)
@pytest.mark.parametrize("shape", [(1,), (3, 70), (500,)])
def test_outputs_and_gradients_are_as_accurate_as_those_of_the_default(
    bias: bool, compiles: bool, size: int, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    ours = layer(size, 289, bias=bias)
    ours.compiles = compiles
    x, grad = torch.randn(*shape, size, requires_grad=True), torch.randn(*shape, 289)
    assert uses_onednn(x, ours.weight)
    exact = [p.detach().double().requires_grad_() for p in (x, *ours.parameters())]
    results = []
    for inputs, function in (
        ([x, *ours.parameters()], partial(linear, compiles=compiles)),
        ([x, *ours.parameters()], nn.functional.linear),
        (exact, nn.functional.linear),
    ):
        out = function(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))])
    assert torch.equal(results[0][0], ours(x))
    for name, *values in zip(("output", "x", "weight", "bias"), *results, strict=False):
        assert_as_accurate(*values, name)
    with torch.no_grad():
        assert torch.equal(ours(x), results[0][0])


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_a_row_has_the_same_bits_in_any_batch_of_two_or_more() -> None:
    weight, x = torch.randn(288, 160), torch.randn(300, 160)
    with torch.no_grad():
        whole = linear(x, weight)
        for num in (2, 3, 16, 17, 31, 64, 100, 257):
            assert torch.equal(linear(x[-num:].contiguous(), weight), whole[-num:]), num


@pytest.mark.usefixtures("_onednn")
def test_small_weights_other_types_and_autocast_keep_the_default() -> None:
    x, weight = torch.randn(4, 256), torch.randn(256, 256)
    assert not uses_onednn(x, torch.randn(8, 256))
    assert not uses_onednn(x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not uses_onednn(x, weight)
        assert linear(x, weight).dtype == torch.bfloat16


def test_the_choice_depends_on_the_processor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {}
    for vendor in ("GenuineIntel", "AuthenticAMD"):
        for capability in ("AVX2", "AVX512"):
            monkeypatch.setattr(module, "cpu_info", lambda _, vendor=vendor: vendor)
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
            chosen[vendor, capability] = module.cpu_products.__wrapped__()
    has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    assert {processor for processor, name in chosen.items() if name == "onednn"} == (
        {("AuthenticAMD", "AVX512")} if has_onednn else set()
    )
