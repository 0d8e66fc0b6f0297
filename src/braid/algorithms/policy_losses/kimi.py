"""kimi: a policy gradient with a squared penalty towards the old policy."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from .base import PolicyLoss, Surrogate, Tokens


class Kimi(PolicyLoss):
    """Policy gradient without ratio, with a squared penalty towards the old policy (Kimi 2025, arXiv
    2501.12599, eq. 3).

        loss = -A log pi + tau / 2 (log pi - log old)^2

    Beyond a distance of 20 the penalty grows linearly, to avoid overflow. Log-probs are per token, in the
    paper per response, so the penalty of a response is a sum of squares instead of the square of a sum.

    Not in RLinf and SkyRL. ROLL: the same, as pg_variant kimi15; its tau is always 0.1.
    """

    metrics = {"penalty": "Mean penalty on the distance from the old policy, per token."}

    kind: Literal["kimi"] = "kimi"
    """The policy gradient with a squared penalty."""
    tau: NonNegativeFloat = 0.1
    """Weight of the squared difference between the current and the old log-prob."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        from torch.nn.functional import huber_loss

        from braid.algorithms.surrogate import LOG_RATIO_BOUND

        logprobs, old = tokens.logprobs, tokens.old_logprobs
        penalty = self.tau * huber_loss(logprobs, old, reduction="none", delta=LOG_RATIO_BOUND)
        return penalty - tokens.advantages * logprobs, {"penalty": penalty.detach()}
