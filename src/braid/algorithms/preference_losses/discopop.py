"""discopop: the loss that a language model discovered."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from .base import Pairs, ReferenceLoss, Tensor


class Discopop(ReferenceLoss):
    """DiscoPOP, a mixture of the logistic and the exponential loss (Lu et al. 2024, arXiv 2406.08414, eq. 5).

    loss = -(1 - m) log s(beta h) + m exp(-beta h), with m = s(beta h / tau)
    """

    kind: Literal["discopop"] = "discopop"
    """A discovered mixture of the logistic and the exponential loss."""
    tau: PositiveFloat = 0.05
    """Temperature of the mixture's weight."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        from torch.nn.functional import logsigmoid

        logits = self.beta * self.difference(pairs)
        share = (logits / self.tau).sigmoid()
        return -logsigmoid(logits) * (1 - share) + (-logits).exp() * share
