"""Fused norms and gated feed-forward layers, and linear layers with faster products (models.linear).
transformers' chains of elementwise operations read and write whole activations several times, which took a
third of a small model's update on CPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .gpu import has_kernels
from .linear import Linear, compute_dtype

_CHUNK_ELEMENTS = 1 << 17
"""Number of elements of an activation that are processed at a time, so that they stay in the cache."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis (arXiv 1910.07467), computed in
    float32."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        scale = self.weight + self.offset if self.offset else self.weight
        if _has_kernels(x):
            from .gpu.kernels import RMSNorm as Norm  # imports Triton

            # What reads it are products, which autocast would have each convert it.
            dtype = compute_dtype(x) if x.dtype == torch.float32 else x.dtype
            return Norm.apply(x, scale, self.eps, dtype)
        if torch.is_grad_enabled() and _is_fused(x) and scale.dtype == torch.float32:
            return _RMSNorm.apply(x, scale, self.eps)
        if self.offset == 0 and x.dtype == scale.dtype:
            return F.rms_norm(x, scale.shape, scale, self.eps)
        return (F.rms_norm(x.float(), scale.shape, eps=self.eps) * scale.float()).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if _has_kernels(gate):
            from .gpu.kernels import SwiGLU  # imports Triton

            return self.down_proj(SwiGLU.apply(gate, up))
        if not torch.is_grad_enabled():
            return self.down_proj(F.silu(gate).mul_(up))
        if _is_fused(gate):
            return self.down_proj(_SwiGLU.apply(gate, up))
        return self.down_proj(F.silu(gate) * up)


def fuse(model: nn.Module, *, compiles: bool = False) -> int:
    """Replace modules by those above in place, where the results match; returns their number. Weights and
    their names stay the same. `compiles`: see models.linear.Linear."""
    count = 0
    for parent in list(model.modules()):
        _fuse_rotary(type(parent).__module__)
        if type(parent) is nn.Linear:
            parent.__class__ = Linear
            cast("Linear", parent).compiles = compiles
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None and _agrees(child, fused):
                setattr(parent, name, fused)
                count += 1
    return count


def _fused(module: nn.Module) -> RMSNorm | GatedMLP | None:
    kind, parts = type(module).__name__, dict(module.named_children())
    if set(parts) == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return GatedMLP(parts["gate_proj"], parts["up_proj"], parts["down_proj"])
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    if (
        kind.endswith("RMSNorm")
        and isinstance(weight, nn.Parameter)
        and weight.ndim == 1
        and isinstance(eps, float)
    ):
        return RMSNorm(weight, eps, 1.0 if kind.startswith("Gemma") else 0.0)
    return None


@torch.no_grad()
def _agrees(module: nn.Module, fused: RMSNorm | GatedMLP) -> bool:
    """Whether both modules agree on random inputs of several magnitudes. Uses small random weights instead of
    the module's own, which may not be loaded yet."""
    generator = torch.Generator().manual_seed(0)
    params = dict(module.named_parameters())
    sizes = {size: 16 + 8 * i for i, size in enumerate(sorted({n for p in params.values() for n in p.shape}))}
    weights = {
        name: (torch.randn([sizes[n] for n in p.shape], generator=generator) / 16).to(p.device, p.dtype)
        for name, p in params.items()
    }
    first = next(iter(weights.values()))
    x = torch.randn(8, first.shape[-1], generator=generator) * torch.logspace(-2, 2, 8)[:, None]
    x = x.to(first.device, first.dtype)
    mine, other = (functional_call(each, weights, (x,)) for each in (fused, module))
    return torch.allclose(mine, other, rtol=torch.finfo(x.dtype).eps * 8, atol=1e-6)


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and has_kernels(x.device) and x.dtype != torch.float64


_Rotary = Callable[..., tuple[Tensor, Tensor]]


def _fuse_rotary(module: str) -> None:
    """Have a module of transformers compute rotary embeddings with one kernel, on GPUs under autocast, where
    their chain of ten operations would be in float32. Elsewhere it computes what it did."""
    scope = vars(sys.modules[module]) if module in sys.modules and torch.cuda.is_available() else {}
    original: _Rotary | None = scope.get("apply_rotary_pos_emb")
    if original is None or hasattr(original, "__wrapped__") or not turns_halves(original):
        return

    @wraps(original)
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        is_plain = not args and not kwargs and q.ndim == 4 and q.shape[-1] == cos.shape[-1]
        if not (
            is_plain and _has_kernels(q) and torch.is_autocast_enabled("cuda") and cos.dtype == torch.float32
        ):
            return original(q, k, cos, sin, *args, **kwargs)
        from .gpu.kernels import Rotary  # imports Triton

        dtype = compute_dtype(q)  # of attention
        return Rotary.apply(q, cos, sin, dtype), Rotary.apply(k, cos, sin, dtype)

    scope["apply_rotary_pos_emb"] = apply


@torch.no_grad()
def turns_halves(rotary: _Rotary) -> bool:
    """Whether a function is x * cos + (-x2, x1) * sin of queries and keys [B, H, T, d] with their halves x1
    and x2, which most of transformers' models have."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = (torch.randn(1, 3, 8, generator=generator) for _ in range(2))
    try:
        made = rotary(q, k, cos, sin)
    except Exception:  # it takes other arguments
        return False
    for x, out in zip((q, k), made, strict=True):
        turned = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
        if out.shape != x.shape or not torch.allclose(
            out, x * cos[:, None] + turned * sin[:, None], atol=1e-6
        ):
            return False
    return True


def _is_fused(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def _chunks(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    """Split [N, D] tensors into chunks of rows that fit the cache together."""
    size = max(1, _CHUNK_ELEMENTS // tensors[0].shape[-1])
    return zip(*(x.split(size) for x in tensors), strict=True)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rates: list[Tensor] = []
        for x_, out_ in _chunks(x.reshape(-1, size), out.view(-1, size)):
            wide, target = x_.float(), out_ if x.dtype == torch.float32 else None
            rates.append(wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_())
            normed = torch.mul(wide, rates[-1], out=target).mul_(scale)
            if target is None:
                out_.copy_(normed)
        ctx.save_for_backward(x, scale, torch.cat(rates))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """With r = 1 / rms(x): dx = r g w - x r^2 / D sum(r g w x), dw = sum over positions of r g x. dw uses
        `Tensor.sum`, which adds the many terms pairwise, where a matrix product would add them sequentially
        and lose precision."""
        x, scale, rates = ctx.saved_tensors
        size = x.shape[-1]
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dscales: list[Tensor] = []
        for x_, grad_, r, dx_ in _chunks(
            x.reshape(-1, size), grad.reshape(-1, size), rates, dx.view(-1, size)
        ):
            wide, target = x_.float(), dx_ if x.dtype == torch.float32 else None
            along = (grad_ * wide).mul_(r)
            dscales.append(along.sum(0))
            dx_wide = torch.mul(grad_, scale, out=target).mul_(r)
            dx_wide.addcmul_(wide, (along @ scale)[:, None].mul_(r.square()).div_(-size))
            if target is None:
                dx_.copy_(dx_wide)
        return dx, torch.stack(dscales).sum(0), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        size = gate.shape[-1]
        for gate_, up_, out_ in _chunks(*(t.reshape(-1, size) for t in (gate, up, out))):
            torch.mul(F.silu(gate_), up_, out=out_)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        size = gate.shape[-1]
        for gate_, up_, grad_, dgate_, dup_ in _chunks(
            *(t.reshape(-1, size) for t in (gate, up, grad, dgate, dup))
        ):
            torch.mul(F.silu(gate_), grad_, out=dup_)
            dgate_.copy_(torch.ops.aten.silu_backward(grad_ * up_, gate_))
        return dgate, dup
