"""policy_gradient: REINFORCE, without a ratio."""

from __future__ import annotations

from typing import Literal

from .base import PolicyLoss, Surrogate, Tokens


class PolicyGradient(PolicyLoss):
    """-A log pi: REINFORCE (Williams 1992). Correct only for tokens sampled from the current policy.

    ROLL calls it vanilla; the closest losses of RLinf and SkyRL multiply by the ratio to the old policy.
    """

    kind: Literal["policy_gradient"] = "policy_gradient"
    """REINFORCE, without a ratio."""

    def per_token(self, tokens: Tokens) -> Surrogate:
        return -tokens.advantages * tokens.logprobs, {}
