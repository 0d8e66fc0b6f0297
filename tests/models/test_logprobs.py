"""Log-probs by tiles equal those of all logits at once, and no larger tensor than a tile is ever made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from braid.models.logprobs import Head, token_logprobs

N, D, V = 13, 6, 700
HEADS = {
    "plain": {},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 1.5},
    "scaled and capped": {"scale": 2.0, "softcap": 3.0},
}


def _tensors(
    dtype: torch.dtype = torch.float64, *, n: int = N, v: int = V
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, D, dtype=dtype, generator=generator)
    weight = torch.randn(v, D, dtype=dtype, generator=generator)
    bias = torch.randn(v, dtype=dtype, generator=generator)
    targets = torch.randint(v, (n,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def _at_once(head: Head, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    raw = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = raw * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _loss(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    weights = torch.linspace(-1.0, 2.0, len(logprobs), dtype=logprobs.dtype)
    return (logprobs * weights).sum() + (0.0 if entropy is None else (entropy * weights.flip(0)).sum())


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_bytes", [1, 200 * 8, 300 * 8 * N, 2**26])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tiles_give_the_numbers_and_gradients_of_all_logits_at_once(
    kind: str, chunk_bytes: int, with_bias: bool
) -> None:
    v = 50 if chunk_bytes == 1 else V  # a tile of a single logit
    hidden, weight, bias, targets = _tensors(v=v)
    head = Head(weight, bias if with_bias else None, **HEADS[kind])
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    ours = token_logprobs(hidden, head, targets, temperature=0.6, with_entropy=True, chunk_bytes=chunk_bytes)
    plain = _at_once(head, hidden, targets, 0.6)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(_loss(*ours), inputs), torch.autograd.grad(_loss(*plain), inputs)
    )


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_bytes", [64, 2**26])
def test_gradcheck_in_double_precision(kind: str, chunk_bytes: int) -> None:
    hidden, weight, bias, targets = _tensors(n=3, v=11)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        head = Head(weight, bias, **HEADS[kind])
        return token_logprobs(
            hidden, head, targets, temperature=1.3, with_entropy=True, chunk_bytes=chunk_bytes
        )

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@settings(max_examples=40, deadline=None)
@given(
    chunk_bytes=st.integers(1, 40_000), n=st.integers(0, 9), v=st.integers(1, 600), seed=st.integers(0, 99)
)
def test_the_chunk_size_changes_nothing(chunk_bytes: int, n: int, v: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, generator=generator).requires_grad_()
    weight = torch.randn(v, D, generator=generator).requires_grad_()
    targets = torch.randint(v, (n,), generator=generator)
    results = []
    for size in (chunk_bytes, 2**26):
        out = token_logprobs(hidden, Head(weight), targets, with_entropy=True, chunk_bytes=size)
        results.append((*out, *torch.autograd.grad(_loss(*out), (hidden, weight))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)  # fp32 sums in another order


class _Largest(TorchDispatchMode):
    """Notes the most bytes of any tensor made that has no size known beforehand."""

    def __init__(self, known: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._known = known
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and tuple(leaf.shape) not in self._known:
                self.num_bytes = max(self.num_bytes, leaf.numel() * leaf.element_size())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [8_000, 16_000, 10**6])
def test_no_tensor_is_larger_than_a_chunk(dtype: torch.dtype, chunk_bytes: int) -> None:
    hidden, weight, bias, targets = _tensors(dtype)
    with _Largest({(N, D), (V, D), (D, V)}) as largest:
        out = token_logprobs(
            hidden, Head(weight, bias, softcap=3.0), targets, with_entropy=True, chunk_bytes=chunk_bytes
        )
        _loss(*out).backward()
    assert min(chunk_bytes, N * V * 4) / 4 < largest.num_bytes <= chunk_bytes


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, bias, targets = _tensors()
    frozen = Head(weight.detach(), bias.detach())
    token_logprobs(hidden, frozen, targets)[0].sum().backward()
    assert hidden.grad is not None
    expected = torch.autograd.grad(_at_once(frozen, hidden, targets, 1.0)[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)


def test_a_loss_of_the_entropy_alone_has_its_gradient() -> None:
    hidden, weight, bias, targets = _tensors()
    head = Head(weight, bias)
    _, entropy = token_logprobs(hidden, head, targets, with_entropy=True, chunk_bytes=999)
    assert entropy is not None
    expected = _at_once(head, hidden, targets, 1.0)[1]
    inputs = (hidden, weight, bias)
    torch.testing.assert_close(
        torch.autograd.grad(entropy.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
    )


def test_entropy_is_none_unless_asked_for() -> None:
    hidden, weight, _, targets = _tensors()
    assert token_logprobs(hidden, Head(weight), targets)[1] is None


def test_half_precision_weights_give_float32_log_probs_close_to_the_exact() -> None:
    hidden, weight, bias, targets = _tensors(torch.bfloat16)
    head = Head(weight, bias)
    ours, _ = token_logprobs(hidden, head, targets)
    exact = _at_once(Head(weight.double(), bias.double()), hidden.double(), targets, 1.0)[0]
    assert ours.dtype == torch.float32
    # logits of size 10 are rounded to 8 bits: 10 * 2**-8 = 0.04
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=0.05)


@pytest.mark.parametrize("chunk_bytes", [8_000, 2**26])
def test_autocast_multiplies_in_its_type_and_gives_gradients_in_the_weights_type(chunk_bytes: int) -> None:
    hidden, weight, bias, targets = _tensors(torch.float32)
    head = Head(weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = token_logprobs(hidden, head, targets, chunk_bytes=chunk_bytes)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight, bias)]
    expected, _ = token_logprobs(low[0], Head(low[1], low[2]), targets, chunk_bytes=chunk_bytes)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=0)
    logprobs.sum().backward()
    exact = torch.autograd.grad(_at_once(head, hidden, targets, 1.0)[0].sum(), (hidden, weight))
    for ours, reference in zip((hidden.grad, weight.grad), exact, strict=True):
        assert ours is not None
        assert ours.dtype == torch.float32
        # bf16 rounds each factor to 2**-8
        torch.testing.assert_close(ours, reference, rtol=0, atol=0.03 * reference.abs().max().item())


def test_logits_of_a_size_that_overflows_exp_stay_finite() -> None:
    weight = torch.eye(4) * 1e4
    logprobs, entropy = token_logprobs(
        torch.eye(4), Head(weight), torch.tensor([0, 1, 2, 0]), with_entropy=True, chunk_bytes=8
    )
    assert entropy is not None
    assert logprobs.tolist() == [0.0, 0.0, 0.0, -1e4]
    assert entropy.tolist() == [0.0] * 4
