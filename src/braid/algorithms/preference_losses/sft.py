"""sft: imitation of the preferred responses."""

from __future__ import annotations

from typing import Literal

from .base import Pairs, PreferenceLoss, Tensor


class Sft(PreferenceLoss):
    """Mean cross-entropy of the tokens of preferred responses; the rejected ones are only measured. Added to
    another loss by prefer.sft_coef."""

    kind: Literal["sft"] = "sft"
    """Imitation of the preferred responses."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        return pairs.cross_entropy
