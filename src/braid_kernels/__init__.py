"""Kernels for CPUs that Numba compiles: attention in training and decode steps, and whole layers of
Llama-like models.

braid works without this package, and reaches it by `kernels_for` only (through braid.models.cpu_kernels).
This file does not import Numba, which takes half a second."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from braid.models.causal_lm import CausalLM
    from braid.models.cpu_kernels import CpuKernels


def kernels_for(lm: CausalLM | None = None) -> CpuKernels:
    """What the kernels compute on this machine: for any model attention in training and gradients of weights;
    of decode steps of `lm` attention, and all layers if nothing is added to them."""
    from braid.models.cpu_kernels import CpuKernels

    if (why_not := _why_not_compiled()) is not None:
        return CpuKernels(why_not)
    from .attention import compiled_attention

    if lm is None:
        return CpuKernels(None, compiled_attention, _weight_gradient)
    from .decoding import CompiledAttention
    from .layers import FusedLayers, can_fuse

    layers = FusedLayers(lm) if can_fuse(lm) else None
    return CpuKernels(None, compiled_attention, _weight_gradient, CompiledAttention, layers)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor | None:
    from .products import fits_panels, weight_gradient  # compiles them

    return weight_gradient(grad, x) if fits_panels(x.shape[1]) else None


def _why_not_compiled() -> str | None:
    """Why kernels cannot be compiled on this machine, with what to do; None if they can."""
    if find_spec("numba") is None:
        return "the package numba is not installed; install it (pip install numba)"
    try:
        from numba import config

        if vars(config)["DISABLE_JIT"]:
            return "Numba is switched off by NUMBA_DISABLE_JIT; unset it"
        from .calls import openmp
    except Exception as error:  # an import that fails may raise any
        return (
            f"Numba does not work here ({type(error).__name__}: {error}); install it anew (pip install numba)"
        )
    try:
        openmp()
    except (AttributeError, OSError):
        return "it needs a PyTorch that uses GNU OpenMP, as on Linux"
    return None
