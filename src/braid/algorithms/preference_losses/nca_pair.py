"""nca_pair: noise contrastive alignment of pairs."""

from __future__ import annotations

from typing import Literal

from .base import Pairs, ReferenceLoss, Tensor


class NcaPair(ReferenceLoss):
    """Noise contrastive alignment (Chen et al. 2024, arXiv 2402.05369).

        loss = -log s(beta c) - 1/2 log s(-beta c) - 1/2 log s(-beta r)

    It keeps the log-prob of the preferred response from falling, which DPO does not.
    """

    kind: Literal["nca_pair"] = "nca_pair"
    """Noise contrastive alignment of pairs."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        from torch.nn.functional import logsigmoid

        chosen, rejected = (self.beta * ratio for ratio in self.ratios(pairs))
        return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
