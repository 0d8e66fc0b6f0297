"""exo_pair: efficient exact optimization on pairs."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from .base import Pairs, ReferenceLoss, Tensor


class ExoPair(ReferenceLoss):
    """Efficient exact optimization (Ji et al. 2024, arXiv 2402.00856, eq. 16): the KL of the policy's
    preferences from the data's, in the direction opposite to DPO's.

        loss = p log(p / (1 - e)) + (1 - p) log((1 - p) / e), with p = s(beta h) and e = label_smoothing

    The KL from certain preferences is infinite, so label_smoothing is above 0.
    """

    kind: Literal["exo_pair"] = "exo_pair"
    """Efficient exact optimization on pairs."""
    label_smoothing: Annotated[float, Field(gt=0.0, lt=0.5)] = 1e-3
    """Share of pairs in which the rejected response is the better one."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        from torch.nn.functional import logsigmoid

        logits, flipped = self.beta * self.difference(pairs), self.label_smoothing
        agrees = logits.sigmoid() * (logsigmoid(logits) - math.log1p(-flipped))
        return agrees + (-logits).sigmoid() * (logsigmoid(-logits) - math.log(flipped))
