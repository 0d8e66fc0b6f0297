"""Experts of mixtures of experts: under autocast they are computed in autocast's type, as linear layers are.

transformers multiplies all experts' tokens by one grouped product. Autocast does not know this product, which
would be in the type of the weights. On GPUs PyTorch's kernel takes bf16 only: for other types it reads the
number of tokens of each expert on the host, in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

_IMPLEMENTATION = "braid"


def use_grouped_experts(model: PreTrainedModel) -> None:
    """Compute the experts of a model that would use transformers' grouped product in autocast's type."""
    has_experts = any(is_experts(module) for module in model.modules())
    if has_experts and "grouped_mm" in model.get_experts_implementation().values():
        ExpertsInterface.register(_IMPLEMENTATION, _forward)
        model.set_experts_implementation(_IMPLEMENTATION)


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds the weights of all experts of a layer as transformers' interface for them asks
    for."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


class _InDtype:
    """An experts module whose tensors are read in another type."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value


def _forward(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        weights: Any = _InDtype(module, torch.get_autocast_dtype(device))
        return grouped_mm_experts_forward(weights, hidden, top_k_index, top_k_weights)
    return grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
