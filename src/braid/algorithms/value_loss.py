"""Value losses: per-token distance between a critic's values and the returns."""

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
    huber_delta: float | None = None,
    deviation: Float[Tensor, "T"] | None = None,
) -> Float[Tensor, "T"]:
    """Clipped value loss: the larger of the losses of the value and of the value clipped to within `clip` of
    the old one.

        loss = max(h(V - R), h(V_old + clip(V - V_old, -c, c) - R))        clip None: h(V - R)
        h(e) = e^2 / 2,  with huber_delta: d |e| - d^2 / 2 where |e| > d

    `clip` and `huber_delta` are in units of `deviation`, the standard deviation of returns by which a critic
    with normalized values scales its output: c = clip * deviation, d = huber_delta * deviation. The loss is
    then deviation^2 times the loss of normalized values and returns, and a clip of 0.2 allows the same
    relative change at any reward scale. None, or 1, for a critic that does not normalize: then both are in
    units of reward.

    A value that has moved further than the clip towards its return gets no gradient; one that has moved away
    keeps its gradient. From the code of Schulman et al. 2017 (see Engstrom et al. 2020, arXiv 2005.12729);
    Huber 1964. RLinf: Huber, clipped. ROLL and SkyRL: squared, clipped. All three use units of reward; none
    normalizes values (SkyRL's normalize_reward divides by a standard deviation that stays at 1).
    """
    unit = torch.ones_like(values) if deviation is None else deviation
    bound = None if huber_delta is None else huber_delta * unit
    loss = _distance(values - returns, bound)
    if clip is not None:
        reach = clip * unit
        kept = old_values + (values - old_values).clamp(-reach, reach)
        loss = torch.maximum(loss, _distance(kept - returns, bound))
    return loss


def _distance(error: Tensor, bound: Tensor | None) -> Tensor:
    """h(e) of value_loss: q (|e| - q / 2) with q = min(|e|, d)."""
    if bound is None:
        return 0.5 * error.square()
    size = error.abs()
    near = size.clamp(max=bound)
    return near * (size - 0.5 * near)
