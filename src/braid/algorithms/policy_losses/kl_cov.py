"""kl_cov: a penalty on the tokens that would reduce entropy most."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from .base import RatioLoss, Surrogate, Tensor, Tokens


class KlCov(RatioLoss):
    """No clip, but a penalty on the tokens that would reduce entropy most (Cui et al. 2025, arXiv
    2505.22617).

        loss = -rho A + cov_coef is_chosen |log pi - log old|

    `is_chosen` is 1 at the tokens that covariance.choose_greatest selected for the step, else 0. On the first
    step after the old log-probs were computed, the penalty and its gradient are 0.

    Tokens are selected before the step; see clip_cov. SkyRL selects within a micro-batch, and does not divide
    the penalty by the number of tokens, as it does the rest of the loss. Not in RLinf and ROLL.
    """

    selects_tokens = True
    metrics = {"chosen_fraction": "Share of tokens that were selected, and are penalised."}

    kind: Literal["kl_cov"] = "kl_cov"
    """A penalty on the tokens that would reduce entropy most."""
    cov_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """Fraction of tokens penalised, by covariance of advantage and log-prob."""
    cov_coef: NonNegativeFloat = 1.0
    """Weight of the penalty |logprob - old_logprob| on the selected tokens."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        penalty = (self.cov_coef * tokens.is_chosen) * (tokens.logprobs - tokens.old_logprobs).abs()
        return penalty - tokens.ratio * tokens.advantages, {"chosen_fraction": tokens.is_chosen}

    def select(self, covariances: Tensor, priorities: Tensor) -> Tensor:
        from braid.algorithms.covariance import choose_greatest

        return choose_greatest(covariances, priorities, fraction=self.cov_fraction)
