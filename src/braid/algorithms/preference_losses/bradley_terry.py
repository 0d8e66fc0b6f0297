"""bradley_terry: a reward model of pairs."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from .base import Pairs, PreferenceLoss, Tensor


class BradleyTerry(PreferenceLoss):
    """A reward model: the preferred conversation is to score higher (Bradley and Terry 1952; Ouyang et al.
    2022, arXiv 2203.02155, eq. 1).

        loss = -t log s(d) - (1 - t) log s(-d) + center_coef (s_c + s_r)^2
        d = s_c - s_r - margin

    s_c and s_r are the scores, t is the column prefer.data[].target_key (1 without one) and margin the column
    margin_key (0). The last term draws the mean score of a pair to 0 (Eisenstein et al. 2023, arXiv
    2312.09244), without which only differences of scores mean anything.
    """

    trains_reward_model = True

    kind: Literal["bradley_terry"] = "bradley_terry"
    """A reward model: a sequence classifier with one output."""
    center_coef: NonNegativeFloat = 0.0
    """Coefficient of the squared sum of a pair's scores."""

    def per_pair(self, pairs: Pairs) -> Tensor:
        from torch.nn.functional import logsigmoid

        difference = pairs.chosen - pairs.rejected
        if pairs.margin is not None:
            difference = difference - pairs.margin
        loss = -logsigmoid(difference)
        if pairs.target is not None:
            loss = pairs.target * loss - (1 - pairs.target) * logsigmoid(-difference)
        return loss + self.center_coef * (pairs.chosen + pairs.rejected).square()
