"""Liger's Triton kernels in a model (`train.liger_kernels`, extra `liger`), through transformers."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from braid.errors import ModelError

_OF_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""braid has its own way from hidden states to log-probs."""


def check_liger(device: torch.device) -> None:
    """Raise ModelError when Liger's kernels cannot run here."""
    missing = (
        [] if find_spec("liger_kernel") else ["the package liger-kernel (pip install 'braid-rl[liger]')"]
    )
    if device.type != "cuda":
        missing.append(f"a CUDA device in place of {device.type}")
    if missing:
        raise ModelError(
            f"train.liger_kernels=true needs {' and '.join(missing)}; set train.liger_kernels=false, which gives the same "
            "numbers up to rounding"
        )


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Put Liger's norms, rotary positions and feed-forward layers in the place of the model's own, where Liger knows its
    architecture."""
    from transformers.integrations.liger import apply_liger_kernel  # imports Triton

    apply_liger_kernel(model, _OF_LOSSES)
