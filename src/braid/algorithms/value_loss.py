"""Value losses: how far a critic is from the returns, per token."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def value_loss(
    values: Float[Tensor, "T"],
    old_values: Float[Tensor, "T"],
    returns: Float[Tensor, "T"],
    *,
    clip: float | None,
) -> Float[Tensor, "T"]:
    """Half the squared error, the larger one of the value and of the value kept within `clip` of the old one.

        loss = 1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2);  clip None: 1/2 (V - R)^2

    A value that has moved further than `clip` towards its return gets no gradient; one that has moved away
    keeps it. From the code of Schulman et al. 2017 (see Engstrom et al. 2020, arXiv 2005.12729). ROLL and
    SkyRL: the same. RLinf takes a Huber loss in place of the square.
    """
    error = (values - returns).square()
    if clip is not None:
        kept = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (kept - returns).square())
    return 0.5 * error
