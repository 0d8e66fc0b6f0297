"""Whitening of advantages over a round."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

WHITEN_VARIANCE_EPSILON = 1e-8
"""Added to the variance when whitening; as in ROLL and SkyRL."""


def whiten(advantages: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Float[Tensor, "T"]:
    """(A - mean) / sqrt(variance + 1e-8) over the masked positions, variance unbiased; 0 outside the mask.

    Pass all positions of a round at once, so that the result does not depend on how the round is split. A
    single position, and advantages that are all equal, become 0.

    ROLL: the same, per domain. RLinf adds 1e-5 to the standard deviation instead, and also whitens on top of
    GRPO. SkyRL always whitens after GAE; its separate batch normalisation includes padding in the mean.
    """
    exact = torch.where(mask, advantages, 0.0).double()
    count = mask.sum()
    centered = torch.where(mask, exact - exact.sum() / count.clamp(min=1), 0.0)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    return (centered * (variance + WHITEN_VARIANCE_EPSILON).rsqrt()).to(advantages.dtype)
