"""Log-probs by tiles equal those of all logits at once, and no larger tensor than a tile is ever made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rounding import rounding
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from braid.algorithms.distillation import divergence as divergence_of
from braid.models import logprobs as logprobs_module
from braid.models.logprobs import DIVERGENCES, Head, TiledLogits, token_logprobs, top_k
from braid.types import TiledDivergence

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


def _reference(head: Head, *, n: int = N) -> tuple[Tensor, Head]:
    """Hidden states and the head of another model with the same vocabulary."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(n, D - 2, dtype=head.weight.dtype, generator=generator)
    weight = torch.randn(len(head.weight), D - 2, dtype=head.weight.dtype, generator=generator)
    bias = None if head.bias is None else torch.randn(len(weight), dtype=weight.dtype, generator=generator)
    return hidden, replace(head, weight=weight, bias=bias)


def _at_once(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    reference: tuple[Tensor, Head],
    kind: TiledDivergence = "kl",
    mixture: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    logp, logq = (
        (_logits(layer, states) / temperature).log_softmax(-1)
        for states, layer in ((hidden, head), (reference[0], reference[1]))
    )
    logq = logq.detach()
    kl = divergence_of(logp, logq, kind=kind, weight=mixture)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), kl


def _logits(head: Head, hidden: Tensor) -> Tensor:
    raw = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = raw * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def _loss(*outputs: Tensor | None) -> Tensor:
    """Weights of log-prob, entropy and KL that differ from token to token."""
    total = torch.zeros(())
    for number, output in enumerate(outputs):
        assert output is not None
        total = total + (output * torch.linspace(-1.0, 2.0 + number, len(output), dtype=output.dtype)).sum()
    return total


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_bytes", [1, 200 * 8, 300 * 8 * N, 2**26])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("divergence", "mixture"),
    [*((name, 0.5) for name in sorted(DIVERGENCES)), *(("jensen_shannon", w) for w in (0.0, 0.3, 1.0))],
)
def test_tiles_give_the_numbers_and_gradients_of_all_logits_at_once(
    kind: str, chunk_bytes: int, with_bias: bool, divergence: TiledDivergence, mixture: float
) -> None:
    v = 50 if chunk_bytes == 1 else V  # a tile of a single logit
    hidden, weight, bias, targets = _tensors(v=v)
    head = Head(weight, bias if with_bias else None, **HEADS[kind])
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    reference = _reference(head)
    ours = token_logprobs(
        hidden,
        head,
        targets,
        temperature=0.6,
        with_entropy=True,
        reference=TiledLogits(*reference, 0.6),
        divergence=divergence,
        mixture=mixture,
        chunk_bytes=chunk_bytes,
    )
    plain = _at_once(head, hidden, targets, 0.6, reference, divergence, mixture)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(_loss(*ours), inputs), torch.autograd.grad(_loss(*plain), inputs)
    )


@pytest.mark.parametrize("chunk_bytes", [1, 200 * 8, 300 * 8 * N, 2**26])
def test_several_targets_of_a_state_share_its_distribution(chunk_bytes: int) -> None:
    hidden, weight, bias, _ = _tensors(v=50)
    head = Head(weight, bias, softcap=3.0)
    targets = torch.stack(
        [torch.randperm(50, generator=torch.Generator().manual_seed(n))[:4] for n in range(N)]
    )
    scale = torch.linspace(-1.0, 2.0, 4 * N, dtype=torch.float64).view(N, 4)
    ours, *_ = token_logprobs(hidden, head, targets, temperature=0.6, chunk_bytes=chunk_bytes)
    plain = (_logits(head, hidden) / 0.6).log_softmax(-1).gather(1, targets)
    torch.testing.assert_close(ours, plain)
    inputs = [hidden, weight, bias]
    torch.testing.assert_close(
        torch.autograd.grad((ours * scale).sum(), inputs), torch.autograd.grad((plain * scale).sum(), inputs)
    )


@pytest.mark.parametrize("chunk_bytes", [1, 2**26])
def test_the_likeliest_tokens_are_those_of_all_logits(chunk_bytes: int) -> None:
    hidden, weight, bias, _ = _tensors()
    tokens, logprobs = top_k(hidden, Head(weight, bias), 5, temperature=0.6, chunk_bytes=chunk_bytes)
    expected = ((hidden @ weight.T + bias) / 0.6).log_softmax(-1).topk(5)
    assert tokens.equal(expected.indices)
    torch.testing.assert_close(logprobs, expected.values.detach())


@pytest.mark.parametrize(
    ("divergence", "temperature", "expected"),
    [
        # p = (1, 2, 1) / 4, q = (2, 1, 1) / 4: ln 2 (1/2 - 1/4) either way; m = (3, 3, 2) / 8, so that both halves
        # are ln(2/3) / 4 + ln(4/3) / 2
        ("kl", 1.0, 0.173287),
        ("forward_kl", 1.0, 0.173287),
        ("jensen_shannon", 1.0, 0.042475),
        # logits halved: p = (1, 4, 1) / 6, q = (4, 1, 1) / 6: ln 4 / 2; m = (5, 5, 2) / 12: ln(2/5) / 6 + 2 ln(8/5) / 3
        ("kl", 0.5, 0.693147),
        ("forward_kl", 0.5, 0.693147),
        ("jensen_shannon", 0.5, 0.160621),
    ],
)
def test_divergences_equal_hand_computed_values(
    divergence: TiledDivergence, temperature: float, expected: float
) -> None:
    mine, other = (torch.tensor([counts], dtype=torch.float64).log() for counts in ([1, 2, 1], [2, 1, 1]))
    head, target = Head(torch.eye(3, dtype=torch.float64)), torch.zeros(1, dtype=torch.long)
    reference = TiledLogits(other, head, temperature)
    *_, ours = token_logprobs(
        mine, head, target, temperature=temperature, reference=reference, divergence=divergence
    )
    assert ours is not None
    assert ours.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_bytes", [64, 2**26])
def test_gradcheck_in_double_precision(kind: str, chunk_bytes: int) -> None:
    hidden, weight, bias, targets = _tensors(n=3, v=11)

    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
        head = Head(weight, bias, **HEADS[kind])
        reference = TiledLogits(*_reference(head, n=len(targets)), 1.3)
        return token_logprobs(
            hidden,
            head,
            targets,
            temperature=1.3,
            with_entropy=True,
            reference=reference,
            chunk_bytes=chunk_bytes,
        )

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


@settings(max_examples=40, deadline=None)
@given(
    chunk_bytes=st.integers(1, 40_000), n=st.integers(0, 9), v=st.integers(1, 600), seed=st.integers(0, 99)
)
def test_the_chunk_size_changes_nothing(chunk_bytes: int, n: int, v: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(v, D, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(v, (n,), generator=generator)
    results = []
    for size in (chunk_bytes, 2**26):
        reference = TiledLogits(*_reference(Head(weight), n=n), 1.0)
        out = token_logprobs(
            hidden, Head(weight), targets, with_entropy=True, reference=reference, chunk_bytes=size
        )
        results.append((*out, *torch.autograd.grad(_loss(*out), (hidden, weight))))
    torch.testing.assert_close(*results)


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
    head = Head(weight, bias, softcap=3.0)
    reference = TiledLogits(*_reference(head), 1.0)
    with _Largest({(N, D), (V, D), (D, V)}) as largest:
        out = token_logprobs(
            hidden, head, targets, with_entropy=True, reference=reference, chunk_bytes=chunk_bytes
        )
        _loss(*out).backward()
    assert min(chunk_bytes, N * V * 4) / 4 < largest.num_bytes <= chunk_bytes


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, bias, targets = _tensors()
    frozen = Head(weight.detach(), bias.detach())
    token_logprobs(hidden, frozen, targets)[0].sum().backward()
    assert hidden.grad is not None
    plain = _at_once(frozen, hidden, targets, 1.0, (hidden, frozen))
    expected = torch.autograd.grad(plain[0].sum(), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected)


def test_a_loss_of_the_entropy_alone_has_its_gradient() -> None:
    hidden, weight, bias, targets = _tensors()
    head = Head(weight, bias)
    reference = _reference(head)
    _, *ours = token_logprobs(
        hidden, head, targets, with_entropy=True, reference=TiledLogits(*reference, 1.0), chunk_bytes=999
    )
    inputs = (hidden, weight, bias)
    for mine, expected in zip(ours, _at_once(head, hidden, targets, 1.0, reference)[1:], strict=True):
        assert mine is not None
        torch.testing.assert_close(
            torch.autograd.grad(mine.square().sum(), inputs, retain_graph=True),
            torch.autograd.grad(expected.square().sum(), inputs, retain_graph=True),
        )


def test_entropy_and_kl_are_none_unless_asked_for() -> None:
    hidden, weight, _, targets = _tensors()
    assert token_logprobs(hidden, Head(weight), targets)[1:] == (None, None)


@pytest.mark.parametrize("chunk_bytes", [8_000, 2**26])
def test_a_small_kl_is_not_lost_in_rounding(chunk_bytes: int) -> None:
    """Logits of size 20 that differ by 1e-3: KL is about 1e-3 ** 2 / 2, and eps * 20 five times that."""
    hidden, weight, bias, targets = (x.detach() for x in _tensors(torch.float32))
    head, near = (
        Head(weight * 8, bias),
        Head(weight * 8 + 1e-3 * _tensors(torch.float32, v=V)[1].flip(0), bias),
    )
    kl = token_logprobs(
        hidden, head, targets, reference=TiledLogits(hidden, near, 1.0), chunk_bytes=chunk_bytes
    )[2]
    states = hidden.double()
    exact = _at_once(
        Head(head.weight.double(), bias.double()), states, targets, 1.0,
        (states, Head(near.weight.double(), bias.double())),
    )[2]  # fmt: skip
    assert kl is not None
    same = token_logprobs(hidden, head, targets, reference=TiledLogits(hidden, head, 1.0))[2]
    assert same is not None
    assert same.abs().max() == 0.0
    torch.testing.assert_close(kl.double(), exact, rtol=0, atol=rounding(8))


def test_half_precision_weights_give_float32_log_probs_close_to_the_exact() -> None:
    hidden, weight, bias, targets = _tensors(torch.bfloat16)
    head = Head(weight, bias)
    states, other = _reference(head)
    ours, _, kl = token_logprobs(hidden, head, targets, reference=TiledLogits(states, other, 1.0))
    assert kl is not None
    assert other.bias is not None
    exact = _at_once(
        Head(weight.double(), bias.double()),
        hidden.double(),
        targets,
        1.0,
        (states.double(), Head(other.weight.double(), other.bias.double())),
    )
    assert ours.dtype == kl.dtype == torch.float32
    # logits of size 10 are rounded to 8 bits: 10 * 2**-8 = 0.04; KL is of the differences of two
    torch.testing.assert_close(ours.double(), exact[0], rtol=0, atol=0.05)
    torch.testing.assert_close(kl.double(), exact[2], rtol=0, atol=0.1)


@pytest.mark.parametrize("chunk_bytes", [8_000, 2**26])
def test_autocast_multiplies_in_its_type_and_gives_gradients_in_the_weights_type(chunk_bytes: int) -> None:
    hidden, weight, bias, targets = _tensors(torch.float32)
    head = Head(weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        reference = TiledLogits(*_reference(head), 1.0)
        logprobs, _, kl = token_logprobs(hidden, head, targets, reference=reference, chunk_bytes=chunk_bytes)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight, bias)]
    states, other = _reference(head)
    assert other.bias is not None
    lower = replace(other, weight=other.weight.bfloat16(), bias=other.bias.bfloat16())
    expected = token_logprobs(
        low[0],
        Head(low[1], low[2]),
        targets,
        reference=TiledLogits(states.bfloat16(), lower, 1.0),
        chunk_bytes=chunk_bytes,
    )
    torch.testing.assert_close((logprobs, None, kl), expected, rtol=0, atol=0)
    logprobs.sum().backward()
    plain = _at_once(head, hidden, targets, 1.0, (states, other))
    exact = torch.autograd.grad(plain[0].sum(), (hidden, weight))
    for ours, reference in zip((hidden.grad, weight.grad), exact, strict=True):
        assert ours is not None
        assert ours.dtype == torch.float32
        # bf16 rounds each factor to 2**-8
        torch.testing.assert_close(ours, reference, rtol=0, atol=0.03 * reference.abs().max().item())


def test_half_precision_products_are_float32_on_gpus() -> None:
    with FakeTensorMode():
        left, right = torch.empty(4, D, device="cuda"), torch.empty(D, V, device="cuda")
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            wide = torch.promote_types(dtype, torch.float32)
            for bias in (None, torch.empty(V, dtype=dtype, device="cuda")):
                assert logprobs_module._product(left.to(dtype), right.to(dtype), bias).dtype == wide


def test_nothing_else_rounds_logits_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        assert left.dtype == right.dtype == torch.bfloat16
        return left.float() @ right.float() + (0 if bias is None else bias)

    hidden, weight, bias, targets = _tensors(torch.bfloat16)
    head = Head(weight, bias)
    with monkeypatch.context() as patch:
        patch.setattr(logprobs_module, "_product", product)
        raw, ours = head.logits(hidden), token_logprobs(hidden, head, targets)[0]
    exact = Head(weight.double(), bias.double())
    plain = _at_once(exact, hidden.double(), targets, 1.0, (hidden.double(), exact))[0]
    size = (hidden.double().abs() @ weight.double().abs().T + bias.double().abs()).max().item()
    error = rounding(D + 1, size=size)
    torch.testing.assert_close(raw.double(), _logits(exact, hidden.double()), rtol=0, atol=error)
    torch.testing.assert_close(ours.double(), plain, rtol=0, atol=2 * error + rounding(V))
    assert error < 1e-4 < (head.logits(hidden).double() - raw).abs().max()  # rounded to bf16


def test_logits_of_a_size_that_overflows_exp_stay_finite() -> None:
    weight = torch.eye(4) * 1e4
    reference = TiledLogits(torch.eye(4).roll(1, 0), Head(weight), 1.0)
    hidden = torch.eye(4).requires_grad_()
    logprobs, entropy, kl = token_logprobs(
        hidden,
        Head(weight),
        torch.tensor([0, 1, 2, 0]),
        with_entropy=True,
        reference=reference,
        chunk_bytes=8,
    )
    assert entropy is not None
    assert kl is not None
    assert kl.tolist() == [1e4] * 4
    assert torch.autograd.grad(kl.sum(), hidden)[0].isfinite().all()
    assert logprobs.tolist() == [0.0, 0.0, 0.0, -1e4]
    assert entropy.tolist() == [0.0] * 4


@pytest.mark.parametrize("chunk_bytes", [8, 200, 2**26])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_bias_of_minus_infinity_excludes_tokens_from_every_number(
    chunk_bytes: int, dtype: torch.dtype
) -> None:
    """As in a padded vocabulary: numbers and gradients are those of the head without these tokens."""
    hidden, weight, bias, targets = (x.to(dtype) if x.is_floating_point() else x for x in _tensors(n=5, v=12))
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    padded = bias.detach().clone()
    padded[8:] = float("-inf")
    padded.requires_grad_()
    targets = targets % 8

    def results(weight: Tensor, bias: Tensor) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        head = Head(weight, bias)
        reference = TiledLogits(hidden.detach().flip(0), head, 0.6)
        outputs = token_logprobs(
            hidden,
            head,
            targets,
            temperature=0.6,
            with_entropy=True,
            reference=reference,
            chunk_bytes=chunk_bytes,
        )
        return outputs, torch.autograd.grad(_loss(*outputs), (hidden, weight, bias))

    outputs, (of_hidden, of_weight, of_bias) = results(weight, padded)
    expected, grads = results(weight[:8], padded[:8])
    tolerance = {"atol": 1e-5, "rtol": 1e-2 if dtype == torch.bfloat16 else 1e-4}
    torch.testing.assert_close(outputs, expected, **tolerance)
    torch.testing.assert_close((of_hidden, of_weight[:8], of_bias[:8]), grads, **tolerance)
    assert not of_weight[8:].any()
    assert not of_bias[8:].any()
