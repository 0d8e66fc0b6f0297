"""The Triton kernels against chains of PyTorch's operations: on a GPU, or without one by Triton's interpreter
(TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or TRITON_INTERPRET=1",
    ),
]
HALF = torch.bfloat16 if HAS_GPU else torch.float16
"""Triton's interpreter multiplies bf16 as integers."""
TYPES = [torch.float32, HALF]
ATOL = {torch.float32: 1e-5, HALF: 0.05}
"""Rounding of values up to about 4."""


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(one.float(), other.float(), rtol=ATOL[dtype], atol=ATOL[dtype])


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_norm_after_an_addition(dtype: torch.dtype, has_delta: bool) -> None:
    from braid.models.gpu.kernels import add_and_norm

    x, delta, weight = drawn(5, 72), drawn(5, 72, dtype=dtype, seed=1), drawn(72, seed=2)
    total = x + delta.float() if has_delta else x.clone()
    out = add_and_norm(x, delta if has_delta else None, weight, eps=1e-6, dtype=dtype)
    assert out.dtype == dtype
    close(out, norm(total, weight), dtype)
    close(x, total, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_gate_and_its_gradients(dtype: torch.dtype) -> None:
    from braid.models.gpu.kernels import SwiGLU

    pairs = [[drawn(7, 150, dtype=dtype, seed=s).requires_grad_() for s in range(2)] for _ in range(2)]
    outs = [SwiGLU.apply(*pairs[0]), F.silu(pairs[1][0]) * pairs[1][1]]
    for out in outs:
        out.backward(drawn(7, 150, dtype=dtype, seed=3))
    close(*outs, dtype)
    for one, other in zip(*pairs, strict=True):
        close(one.grad, other.grad, dtype)


@pytest.mark.parametrize("shape", [(7, 72), (3, 5, 4, 24), (1300, 16), (2, 5000)])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_norm_and_its_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from braid.models.gpu.kernels import RMSNorm

    pairs = [[drawn(*shape).requires_grad_(), drawn(shape[-1], seed=1).requires_grad_()] for _ in range(2)]
    outs = [RMSNorm.apply(*pairs[0], 1e-6, dtype), norm(*pairs[1]).to(dtype)]
    assert outs[0].dtype == dtype
    for out in outs:
        out.backward(drawn(*shape, dtype=dtype, seed=2))
    close(*outs, dtype)
    for one, other in zip(*pairs, strict=True):
        assert one.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("batch", "heads", "size"), [(1, 3, 24), (2, 4, 32)])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_rotary_embedding_and_its_gradients(dtype: torch.dtype, batch: int, heads: int, size: int) -> None:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    from braid.models.gpu.kernels import Rotary

    x = drawn(batch, 6, heads, size, dtype=dtype).requires_grad_()
    states, grad = x.transpose(1, 2), drawn(batch, heads, 6, size, dtype=dtype, seed=3)
    cos, sin = drawn(1, 6, size, seed=1), drawn(1, 6, size, seed=2)
    one, other = (
        Rotary.apply(states, cos, sin, dtype),
        apply_rotary_pos_emb(states, states, cos, sin)[0].to(dtype),
    )
    assert one.dtype == dtype
    close(one, other, dtype)
    close(*(torch.autograd.grad(out, x, grad)[0] for out in (one, other)), dtype)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("size", [32, 24])
@pytest.mark.parametrize("dtype", TYPES)
def test_queries_and_keys_have_their_norm_and_rotary_embedding(
    dtype: torch.dtype, size: int, has_norm: bool
) -> None:
    from braid.models.gpu.kernels import prepare

    num, q_heads, kv_heads, row, length = 3, 4, 2, 1, 10
    q, k, v = (drawn(num, h * size, dtype=dtype, seed=h + 1) for h in (q_heads, kv_heads, kv_heads))
    weights, rotary = [drawn(size, seed=s) for s in (5, 6)], drawn(num, 2 * size, seed=7)
    positions = torch.tensor([0, 4, 9], device=DEVICE)
    keys, values = (
        torch.zeros(num + 2, kv_heads, length, size, dtype=dtype, device=DEVICE) for _ in range(2)
    )

    def turned(x: Tensor, heads: int, weight: Tensor) -> Tensor:
        x = x.view(num, heads, size).float()
        x = norm(x, weight) if has_norm else x
        cosines, sines = rotary[:, None, :size], rotary[:, None, size:]
        return x * cosines + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1) * sines

    out = prepare(
        q, k, v, norms=(weights[0], weights[1], 1e-6) if has_norm else None, rotary=rotary, positions=positions,
        keys=keys, values=values, row=row,
    )  # fmt: skip
    close(out, turned(q, q_heads, weights[0]), dtype)
    rows = torch.arange(num, device=DEVICE) + row
    close(keys[rows, :, positions], turned(k, kv_heads, weights[1]), dtype)
    close(values[rows, :, positions], v.view(num, kv_heads, size), dtype)
    keys[rows, :, positions] = 0
    assert not keys.any(), "nothing else is written"


@pytest.mark.parametrize("how", ["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (14, 2, 64), (3, 1, 40)])
@pytest.mark.parametrize("longest", [100, 700])  # in one part, and in several
@pytest.mark.parametrize("dtype", TYPES)
def test_attention_to_the_cache(
    dtype: torch.dtype, longest: int, heads: int, kv_heads: int, size: int, how: str
) -> None:
    from braid.models.gpu.kernels import attend_cache

    positions = torch.tensor([0, 17, longest - 1], device=DEVICE)
    keys, values = (drawn(5, kv_heads, longest + 4, size, dtype=dtype, seed=s) for s in (0, 1))
    query, sinks = drawn(3, heads, size, dtype=dtype, seed=2), drawn(heads, seed=3)
    window, softcap = 9 if how == "window" else None, 2.0 if how == "softcap" else None
    out = attend_cache(
        query, keys, values, positions=positions, row=2, longest=longest, scaling=0.3, window=window, softcap=softcap,
        sinks=sinks if how == "sinks" else None,
    )  # fmt: skip
    for i, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position + 1 - window)
        k, v = (x[2 + i, :, first : position + 1].float() for x in (keys, values))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        scores = torch.einsum("hd,hnd->hn", query[i].float(), k) * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if how == "sinks":
            scores = torch.cat((scores, sinks[:, None]), dim=1)
            v = torch.cat((v, torch.zeros_like(v[:, :1])), dim=1)
        close(out[i], torch.einsum("hn,hnd->hd", scores.softmax(-1), v), dtype)
