"""Fused norms and feed-forward layers give what the layers of transformers give, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.rounding import assert_as_accurate, assert_near, rounding
from torch import nn
from transformers import PreTrainedModel

from braid.models.fused import GatedMLP, RMSNorm, fuse


def test_every_rms_norm_of_every_architecture_is_replaced_and_nothing_changes(
    tiny_model: Callable[..., PreTrainedModel], architecture: str
) -> None:
    model = tiny_model(architecture)
    plain = copy.deepcopy(model)
    num_norms = sum(type(m).__name__.endswith("RMSNorm") for m in plain.modules())
    assert fuse(model) >= num_norms  # a few architectures have LayerNorm
    assert not any(
        type(m).__name__.endswith("RMSNorm") and not isinstance(m, RMSNorm) for m in model.modules()
    )
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    ids = torch.arange(40)[None] % model.config.vocab_size
    for net in (plain, model):
        net.train()
        net(input_ids=ids).logits.square().mean().backward()
    # 3 layers, whose longest sums are over 96 tokens of the vocabulary, 48 features and 40 positions.
    tolerance = rounding(3 * (96 + 48 + 40))
    with torch.no_grad():
        assert_near(model(input_ids=ids).logits, plain(input_ids=ids).logits, tolerance)
    for (name, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert_near(mine.grad, other.grad, tolerance, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norms_gradient_is_as_accurate_as_autograds(offset: float, dtype: torch.dtype) -> None:
    """In bf16 with a weight in float32, as autocast has it."""
    norm = RMSNorm(nn.Parameter(torch.randn(48)), 1e-6, offset)
    # in several chunks; the weight's gradient has 15,000 terms
    x = torch.randn(3, 1000, 5, 48, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    ours = torch.autograd.grad(norm(x), [x, norm.weight], grad)
    plain, exact = (
        _norm_gradients(x, norm.weight, offset, grad, precision)
        for precision in (torch.float32, torch.float64)
    )
    for name, mine, other, reference in zip(("x", "weight"), ours, plain, exact, strict=True):
        assert_as_accurate(mine, other.to(mine.dtype), reference, name)


def _norm_gradients(
    x: torch.Tensor, weight: torch.Tensor, offset: float, grad: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """By autograd, of the formula as it is written."""
    x, weight = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
    out = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (weight + offset)
    return torch.autograd.grad(out, [x, weight], grad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gates_gradient_is_as_accurate_as_autograds(dtype: torch.dtype) -> None:
    layers = [nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)]
    x = torch.randn(5000, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours, plain = (_gate_gradients(layers, x, is_plain=is_plain) for is_plain in (False, True))
    exact = _gate_gradients([copy.deepcopy(layer).double() for layer in layers], x.double(), is_plain=True)
    for name, *gradients in zip(("x", "gate", "up", "down"), ours, plain, exact, strict=True):
        assert_as_accurate(*gradients, name)


def _gate_gradients(layers: list[nn.Linear], x: torch.Tensor, *, is_plain: bool) -> tuple[torch.Tensor, ...]:
    gate, up, down = layers
    x = x.clone().requires_grad_()
    out = down(nn.functional.silu(gate(x)) * up(x)) if is_plain else GatedMLP(*layers)(x)
    return torch.autograd.grad(out.square().mean(), [x, gate.weight, up.weight, down.weight])


def test_a_layer_that_computes_something_else_is_left_alone() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
            self.act_fn = nn.GELU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    assert fuse(nn.Sequential(OddRMSNorm(), MLP())) == 0
