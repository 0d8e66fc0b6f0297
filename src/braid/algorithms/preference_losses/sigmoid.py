"""sigmoid, sigmoid_norm: direct preference optimization, on log ratios of responses or of their tokens."""

from __future__ import annotations

from typing import Literal

from .base import Pairs, ReferenceLoss, Smoothing, Tensor


class Sigmoid(ReferenceLoss):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

        loss = -(1 - label_smoothing) log s(beta h) - label_smoothing log s(-beta h)

    With label_smoothing it is cDPO. TRL smooths only robust, exo_pair and aot; ROLL and OpenRLHF as here.
    """

    kind: Literal["sigmoid"] = "sigmoid"
    """Direct preference optimization (DPO)."""
    label_smoothing: Smoothing = 0.0
    """Assumed share of pairs whose responses are the wrong way round."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        return smoothed(self.beta * self.difference(pairs), self.label_smoothing)


class SigmoidNorm(Sigmoid):
    """DPO on the mean log ratio of a response's tokens, so that long responses count as short ones do.

    loss = -log s(beta (c / n_c - r / n_r)), smoothed as `sigmoid`
    """

    kind: Literal["sigmoid_norm"] = "sigmoid_norm"  # pyright: ignore[reportIncompatibleVariableOverride]
    """DPO on the mean log ratio of a response's tokens."""
    length_normalized: bool = True
    """Divide the log ratio of each response by its number of tokens."""


def smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """-(1 - smoothing) log s(x) - smoothing log s(-x) of each of `logits` [N]."""
    from torch.nn.functional import logsigmoid

    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)
