"""Matrix products of linear layers in float32 on CPUs, by oneDNN where it is faster than PyTorch's default,
MKL.

MKL uses AVX-512 only on Intel's processors. On others oneDNN was measured at twice its rate, with the weights
as they are: packing them for oneDNN gained up to 29 % more from 64 rows on, for a copy of the weights. On CPU
oneDNN gives a row the same bits in any batch of two rows or more.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from braid.plan.machine import cpu_info

from .cpu_kernels import cpu_kernels

_log = logging.getLogger(__name__)

LEAST_WEIGHTS = 2**15
"""Below, the 12 microseconds that a call of oneDNN costs exceed the gain. No choice depends on the number of
rows."""


@cache
def cpu_products() -> str:
    """The library of large float32 products on this machine's CPU: `mkl` (PyTorch's default, whatever it is)
    or `onednn`. Depends on the processor only, so that a resumed run computes the same bits."""
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    is_slow_in_mkl = torch.backends.cpu.get_cpu_capability() == "AVX512" and cpu_info("vendor_id") not in (
        "GenuineIntel",
        "",
    )
    if not (has_onednn and is_slow_in_mkl):
        return "mkl"
    _log.info("large float32 linear layers use oneDNN, because MKL does not use this CPU's AVX-512")
    return "onednn"


class Linear(nn.Linear):
    """nn.Linear with the products of `cpu_products`. With `compiles` and oneDNN, gradients of weights are
    those of braid_kernels, which was measured at 1.2 to 1.4 times oneDNN's rate."""

    compiles = False

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name
        """[..., D] -> [..., N]."""
        return linear(input, self.weight, self.bias, compiles=self.compiles)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, compiles: bool = False) -> Tensor:
    """x @ weight.T + bias: [..., D], [N, D], [N] -> [..., N]. Differentiable once where oneDNN computes it.
    `compiles`: see Linear."""
    if not uses_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        # of two dimensions: for more, oneDNN's result is a view, which autograd forbids to change in place
        return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, compiles).view(*x.shape[:-1], -1)
    return _onednn(x, weight, bias)


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` computes this product with oneDNN."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == x.dtype == torch.float32
        and weight.numel() >= LEAST_WEIGHTS
        and x.numel() > 0
        and type(weight) in (Tensor, nn.Parameter)  # no DTensor
        and cpu_products() == "onednn"
        and not torch.is_autocast_enabled("cpu")
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.no_grad():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, compiles: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.compiles = compiles
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        gradient = _compiled_gradient if ctx.compiles else _gradient
        return (
            _onednn(grad, weight.t(), None) if wants_x else None,
            gradient(grad, x) if wants_weight else None,
            grad.sum(0) if wants_bias else None,
            None,
        )


def _gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x. oneDNN copies a first factor that is transposed, at the rate of memory, but not the
    second."""
    return (
        _onednn(grad.t(), x.t(), None) if grad.shape[1] <= x.shape[1] else _onednn(x.t(), grad.t(), None).t()
    )


def _compiled_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The same by a compiled kernel, where there is one for this shape."""
    product = cpu_kernels().weight_gradient(grad, x)
    return _gradient(grad, x) if product is None else product


def compute_dtype(x: Tensor) -> torch.dtype:
    """Type of products with `x`: autocast's, or that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
