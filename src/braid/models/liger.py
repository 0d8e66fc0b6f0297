"""Liger Triton kernels (`train.liger_kernels`, extra `liger`), applied through transformers."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from braid.errors import ModelError

_OF_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Disabled: braid computes log-probs from hidden states itself."""


def check_liger(device: torch.device) -> None:
    """Raise ModelError if Liger's kernels cannot run on this machine."""
    missing = (
        [] if find_spec("liger_kernel") else ["the package liger-kernel (pip install 'braid-rl[liger]')"]
    )
    if device.type != "cuda":
        missing.append(f"a CUDA device instead of {device.type}")
    if missing:
        raise ModelError(
            f"train.liger_kernels=true needs {' and '.join(missing)}; or set train.liger_kernels=false (same results "
            "up to rounding)"
        )


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Replace norms, rotary embeddings and feed-forward layers by Liger's, if Liger supports the
    architecture."""
    from transformers.integrations.liger import apply_liger_kernel  # imports Triton

    apply_liger_kernel(model, _OF_LOSSES)
