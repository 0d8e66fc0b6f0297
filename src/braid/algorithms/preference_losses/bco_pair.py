"""bco_pair: binary classifier optimization on pairs."""

from __future__ import annotations

from typing import Literal

from .base import Pairs, ReferenceLoss, Tensor


class BcoPair(ReferenceLoss):
    """Binary classifier optimization (Jung et al. 2024, arXiv 2404.04656) on pairs, without the paper's
    running shift of rewards.

    loss = -log s(beta c) - log s(-beta r)
    """

    kind: Literal["bco_pair"] = "bco_pair"
    """Binary classifier optimization on pairs."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        from torch.nn.functional import logsigmoid

        chosen, rejected = self.ratios(pairs)
        return -logsigmoid(self.beta * chosen) - logsigmoid(-self.beta * rejected)
