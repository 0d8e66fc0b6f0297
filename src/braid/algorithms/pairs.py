"""The numbers of a batch of preference pairs that losses read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """N pairs of a preferred and a rejected response to one prompt.

    `chosen` and `rejected` [N] are the policy's log-probs of whole responses, sums over their tokens; for a
    reward model its scores. `ref_chosen` and `ref_rejected` [N] are those of the reference, 0 without one.
    `num_chosen` and `num_rejected` [N] count the responses' tokens. `mean_chosen` [N] is the mean of
    `num_chosen` over all pairs of the optimizer step, of which the batch may be a part.

    `margin` [N] is how much better the preferred response is, and `target` [N] the probability with which it
    is preferred, if columns of the data have them. `matched` [N] is what `PreferenceLoss.match` returned for
    the whole step.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    num_chosen: Tensor
    num_rejected: Tensor
    mean_chosen: Tensor
    margin: Tensor | None = None
    target: Tensor | None = None
    matched: Tensor | None = None

    @property
    def cross_entropy(self) -> Tensor:
        """[N], whose mean over the step's pairs is the mean cross-entropy of the tokens of preferred
        responses."""
        return -self.chosen / self.mean_chosen
