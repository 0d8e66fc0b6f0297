"""Where braid meets braid_kernels: kernels for CPUs that Numba compiles, in a package that may be absent.

Nothing else of braid imports it. Each of its kernels differs by rounding only from the plain code that runs
without it, which is the reference that its tests compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from .attention import AttentionContext, AttentionKernel, causal_attention

if TYPE_CHECKING:
    from .causal_lm import CausalLM


class StepLayers(Protocol):
    """All layers of a model, with a copy of its weights. Blocks are those of the native engine's cache."""

    def update(self, *, is_new: bool) -> None:
        """Copy the weights if they have changed: `is_new`, or seen by their addresses and versions."""

    def logits(self, input_ids: Tensor, positions: Tensor, context: AttentionContext, rows: Tensor) -> Tensor:
        """Logits [R, V] after `rows` [R] of the tokens [T] at `positions` [T]."""
        ...

    def step(self, inputs: Tensor, blocks: Sequence[Any]) -> Tensor:
        """Logits after a decode step: `inputs` [3, B] are tokens, their positions, and the row of each
        result."""
        ...

    def forget(self) -> None:
        """Drop recorded steps, with their memory."""


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """What compiled kernels compute for a model. The defaults are the plain code, which computes what they
    leave out."""

    why_not: str | None = None
    """Why nothing is compiled on this machine, with what to do."""
    attention: AttentionKernel = causal_attention
    """Attention in training and of prompts."""
    weight_gradient: Callable[[Tensor, Tensor], Tensor | None] = lambda _grad, _x: None
    """grad.T @ x: [T, N], [T, D] -> [N, D]; None where no kernel computes it."""
    decode_attention: Callable[[Tensor, Sequence[Any]], AttentionContext] | None = None
    """Attention of a decode step: positions [B] and blocks of the cache."""
    layers: StepLayers | None = None
    """All layers of prefills and decode steps."""


def cpu_kernels(lm: CausalLM | None = None) -> CpuKernels:
    """What kernels compute on this machine; with `lm`, what they compute of its decode steps too."""
    try:
        from braid_kernels import kernels_for
    except ModuleNotFoundError as error:
        if error.name != "braid_kernels":
            raise
        return CpuKernels("the package braid_kernels is not installed; install braid-rl anew")
    return kernels_for(lm)
