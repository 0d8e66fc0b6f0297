"""robust: DPO whose mean is unbiased under flipped pairs."""

from __future__ import annotations

from typing import Literal

from .base import Pairs, ReferenceLoss, Smoothing, Tensor


class Robust(ReferenceLoss):
    """DPO that is unbiased if a known share of the pairs is the wrong way round (Chowdhury et al. 2024, arXiv
    2403.00409).

    loss = (-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e), with e = label_smoothing
    """

    kind: Literal["robust"] = "robust"
    """DPO that is unbiased under flipped pairs."""
    label_smoothing: Smoothing = 0.0
    """Share of pairs whose responses are the wrong way round."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        from torch.nn.functional import logsigmoid

        logits, flipped = self.beta * self.difference(pairs), self.label_smoothing
        loss = -(1 - flipped) * logsigmoid(logits) + flipped * logsigmoid(-logits)
        return loss / (1 - 2 * flipped)
