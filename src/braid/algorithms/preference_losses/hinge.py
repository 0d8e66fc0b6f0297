"""hinge: the hinge loss of SLiC."""

from __future__ import annotations

from typing import Literal

from .base import Pairs, ReferenceLoss, Tensor


class Hinge(ReferenceLoss):
    """The hinge loss (SLiC, Zhao et al. 2023, arXiv 2305.10425; RSO, arXiv 2309.06657).

    loss = max(0, 1 - beta h)
    """

    kind: Literal["hinge"] = "hinge"
    """The hinge loss of SLiC."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        return (1 - self.beta * self.difference(pairs)).clamp(min=0)
