"""cross_entropy: imitation of every token."""

from __future__ import annotations

from typing import Literal

from .base import PolicyLoss, Surrogate, Tokens


class CrossEntropy(PolicyLoss):
    """-log pi: imitation of every token, whatever its advantage. Tokens not to be imitated must be masked
    beforehand.

    RLinf and ROLL: only in supervised training. SkyRL: the same, for recorded responses.
    """

    kind: Literal["cross_entropy"] = "cross_entropy"
    """Imitation of every token."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        return -tokens.logprobs, {}
