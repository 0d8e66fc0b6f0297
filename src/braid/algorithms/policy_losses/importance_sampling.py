"""importance_sampling: the unclipped policy gradient of tokens of the old policy."""

from __future__ import annotations

from typing import Literal

from .base import RatioLoss, Surrogate, Tokens


class ImportanceSampling(RatioLoss):
    """-rho A: the unbiased, unclipped policy gradient for tokens sampled from the old policy.

    Its variance grows with the distance between the policies, so use it with few steps per round, or with
    corrections. RLinf and ROLL: PPO with bounds that never bind. SkyRL (and Tinker): the same, but summed
    over tokens, ignoring the configured reduction.
    """

    kind: Literal["importance_sampling"] = "importance_sampling"
    """The policy gradient with an unclipped ratio."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        return -tokens.ratio * tokens.advantages, {}
