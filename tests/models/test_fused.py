"""Fused norms and feed-forward layers give what the layers of transformers give, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
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
    with torch.no_grad():
        # The same sums in another order: a few roundings of float32.
        torch.testing.assert_close(
            model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-5
        )
    for (name, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(
            mine.grad, other.grad, rtol=2e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norms_gradient_is_the_chain_rules(offset: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(nn.Parameter(torch.randn(48)), 1e-6, offset)
    x = torch.randn(3, 1000, 5, 48, requires_grad=True)  # more than one piece
    grad = torch.randn_like(x)
    got = torch.autograd.grad(norm(x), [x, norm.weight], grad)
    exact = x.detach().double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    by_hand = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + offset)
    want = torch.autograd.grad(by_hand, [exact, weight], grad.double())
    for mine, true in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-4)  # float32 sums of 15,000 terms


def test_the_gates_gradient_is_the_chain_rules() -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(
        nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
    )
    exact = copy.deepcopy(mlp).double()
    x = torch.randn(5000, 32, requires_grad=True)
    y = x.detach().double().requires_grad_()
    mlp(x).square().mean().backward()
    hidden = nn.functional.silu(exact.gate_proj(y)) * exact.up_proj(y)
    exact.down_proj(hidden).square().mean().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-8)
    for mine, true in zip(mlp.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        torch.testing.assert_close(mine.grad.double(), true.grad, rtol=1e-4, atol=1e-8)


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
